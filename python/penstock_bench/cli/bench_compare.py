"""`penstock bench compare`: whether storage got slower."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.examples import example
from penstock.cli.units import Finite
from penstock.common.console import PATH, console, json_option, print_json, table
from penstock_bench.results import results as results_module
from penstock_bench.results.compare import MARGIN, Compared, compare
from penstock_bench.results.results import Results

if TYPE_CHECKING:
    from pathlib import Path


@click.command("compare", epilog=example("penstock bench compare before.json after.json"))
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@click.option(
    "--margin",
    type=Finite(0, 1),
    default=MARGIN,
    show_default=True,
    help="What is too little to matter.",
)
@click.option("--paired", is_flag=True, help="They were measured in turns, round by round.")
@json_option
def bench_compare(before: Path, after: Path, margin: float, paired: bool, as_json: bool) -> int:
    """Tell whether the run AFTER is slower than the run BEFORE.

    Both are files of `penstock bench io --output` or `bench checkpoint --output`, or directories of
    such files, which are pooled. Exits with 1 if a case is slower by more than the margin, and not
    by chance, or has failed, or was not measured, or not often enough; so it can be the gate of a
    CI job. Take eleven rounds or more: fifteen where those of one run differ by five per cent.
    """
    runs = Results.read(before), Results.read(after)
    found = compare(*runs, margin=margin, is_paired=paired)
    circumstances = results_module.circumstances(*runs)
    is_slower = any(one.verdict == "slower" for one in found)
    code = int(not all(one.passes for one in found))
    if as_json:
        cases_of = [_plain(one) for one in found]
        print_json(
            {
                "is_slower": is_slower,
                "margin": margin,
                "is_paired": paired,
                "circumstances": circumstances,
                "cases": cases_of,
            }
        )
        return code
    rows = table(
        "case", "before", "after", "ratio", "verdict",
        numbers=["before", "after", "ratio"], folded=["case"],
    )  # fmt: skip
    for one in found:
        style = {"faster": "green", "same": "", "unclear": ""}.get(one.verdict, "red")
        figures = ["", "", ""]
        if not math.isnan(one.ratio):
            has_interval = not math.isnan(one.low)
            interval = f" [{one.low:.3f}, {one.high:.3f}]" if has_interval else ""
            figures = [f"{one.before:.2f}", f"{one.after:.2f}", f"{one.ratio:.3f}{interval}"]
        rows.add_row(one.case, *figures, one.verdict, style=style)
    out = console()
    out.print(rows)
    for one in found:
        if one.reason is not None:
            out.print(f"{one.case}: {one.reason}")
    if any(one.verdict == "unclear" for one in found):
        out.print("unclear: it could be slower or the same. Take more rounds.")
    if circumstances:
        out.print(f"not the same before and after: {'; '.join(circumstances)}")
    return code


def _plain(one: Compared) -> dict[str, Any]:
    """The fields of a comparison; NaN is null in JSON."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in one._asdict().items()
    }
