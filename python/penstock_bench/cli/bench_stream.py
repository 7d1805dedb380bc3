"""`penstock bench stream`: how fast models are that do not fit into memory, by us and others."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import click
import numpy as np

from penstock.cli import working
from penstock.cli.examples import example
from penstock.cli.names import names_of
from penstock.cli.units import BYTE_COUNT, Finite
from penstock.common.console import PATH, console, json_option, table
from penstock.errors import MissingDependencyError
from penstock_bench.cli import outputs
from penstock_bench.cli.outputs import output_option, print_headlines, print_remarks, report_option
from penstock_bench.harness.running import unused
from penstock_bench.peers.stream import GENERATORS, OURS, RESIDENT
from penstock_bench.results.spread import known_spread, spread
from penstock_bench.suites.stream import stream, tokens
from penstock_bench.suites.stream.stream import SIZES, Plan, Stream

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.results.results import Results

_ROUNDS = 5
_TIMES_WEIGHTS = 2.2
"""Free space for each byte of weights: the model, and the files of one other library."""


@click.command(
    "stream", epilog=example("penstock bench stream /scratch --by penstock,resident --rounds 7")
)
@click.argument("directory", type=PATH, default=".")
@click.option("--model", type=click.Choice([*SIZES]), default="1b", show_default=True)
@click.option(
    "--by",
    "names",
    metavar="LIST",
    default=",".join(GENERATORS),
    callback=names_of({name: entry.note for name, entry in GENERATORS.items()}),
    help=f"Who generates. [{', '.join(GENERATORS)}]",
)
@click.option("--limit", type=BYTE_COUNT, help="Memory of each process. [half of the model]")
@click.option("--tokens", "count", type=click.IntRange(2), default=12, show_default=True)
@click.option(
    "--lookup",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Guess up to so many tokens from those before, and check them in one pass, all alike.",
)
@click.option("--rounds", type=click.IntRange(1), default=_ROUNDS, show_default=True)
@click.option(
    "--timeout", type=Finite(min=1), default=900.0, show_default=True, help="Of a process."
)
@output_option
@report_option
@json_option
def bench_stream(
    directory: Path,
    model: str,
    names: list[str],
    limit: int | None,
    count: int,
    lookup: int,
    rounds: int,
    timeout: float,
    output: Path | None,
    report: Path | None,
    as_json: bool,
) -> int:
    """Generate text in DIRECTORY with a model that does not fit into memory.

    A Llama of random weights is made, and removed in the end. Each process has its memory limited
    by a control group, but for the one that has the model in memory: it tells what computing takes,
    and what the logits are. In each round fio reads the same files before penstock does and after.
    """
    outputs.check_distinct(output, report)
    if find_spec("transformers") is None:
        raise MissingDependencyError(
            "bench stream takes transformers: pip install transformers", name="transformers"
        )
    place = directory.absolute()
    outputs.check_directory(place)
    needed = _TIMES_WEIGHTS * stream.weight_bytes(model)
    what = "the model with the files of others takes"
    outputs.check_room(place, needed, what, "a smaller --model")
    present = outputs.installed(names, GENERATORS)
    plan = Plan(
        work=unused(place), size=model, names=present, rounds=rounds, tokens=count, lookup=lookup,
        limit_bytes=limit, timeout_seconds=timeout,
    )  # fmt: skip
    settings = {
        "model": model, "tokens": count, "lookup": lookup, "rounds": rounds, "by": ",".join(present)
    }  # fmt: skip
    results = outputs.started("stream", place, settings)
    with outputs.reported(results, _print, output=output, report=report, as_json=as_json):
        working.worked(plan.work, lambda say: Stream(plan, results, say).run(), is_quiet=as_json)
    return int(not results.of(tokens.CASE, OURS))


def _print(results: Results) -> None:
    out = console()
    print_headlines(results)
    limit, weights = (results.settings[name] for name in ("limit_bytes", "weight_bytes"))
    out.print(f"weights of {weights / 1e9:.2f} GB, memory of {limit / 1e9:.2f} GB a process")
    numbers = ["tokens/s", "times", "first s", "MB", "wrote", "CPU s"]
    rows = table("by", *numbers, "logits", numbers=numbers)
    for by, rates in tokens.token_rates(results).items():
        made = results.of(tokens.CASE, by)
        times = tokens.times_of(results, by)
        rows.add_row(
            by,
            known_spread(rates).with_range(".2f"),
            f"{np.median(times):.1f}" if times and by != OURS else "",
            f"{np.median([one.first_token_seconds for one in made]):.2f}",
            f"{np.median([one.memory_over_bytes for one in made]) / 1e6:,.0f}",
            f"{np.median([one.written_bytes for one in made]) / 1e6:,.1f}",
            f"{np.median([one.cpu_seconds / one.requests for one in made]):.2f}",
            "same" if all(one.checked == one.requests for one in made) else "other",
        )
    out.print(rows)
    out.print(
        f"times: as fast {OURS} is; MB: memory at its most, without interpreter and libraries;"
        " wrote: MB to storage; CPU s: of a token"
    )
    read = [one.gb_per_second for one in results.of(tokens.CASE, tokens.FIO)]
    memory = [
        one.memory_over_bytes / one.budget_bytes
        for one in results.of(tokens.CASE, OURS)
        if one.memory_over_bytes and one.budget_bytes
    ]
    pass_tokens = [one.pass_tokens for one in results.of(tokens.CASE, OURS) if one.pass_tokens]
    for sentence, form, values in (
        ("a pass gives {} tokens", ".2f", pass_tokens if results.settings["lookup"] else []),
        ("fio reads the files at {} GB/s", ".2f", read),
        (
            f"{OURS} has {{}} of what reading or computing allows",
            ".2f",
            tokens.of_roofline(results),
        ),
        (
            "its first token takes {} of a pass over all weights",
            ".2f",
            tokens.first_of_pass(results),
        ),
        ("its memory is {} of its budget", ".3f", memory),
        *(
            (f"a GB read takes {by} {{}} s of a processor", ".3f", seconds)
            for by in tokens.token_rates(results)
            if by != RESIDENT and (seconds := tokens.cpu_seconds_per_gb(results, by))
        ),
    ):
        if found := spread(values):
            out.print(sentence.format(found.with_range(form)))
    print_remarks(results)
