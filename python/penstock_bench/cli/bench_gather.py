"""`penstock bench gather`: how fast rows come by id, by us and others, and what caches miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import working
from penstock.cli.examples import example
from penstock.cli.names import names_of
from penstock.cli.units import Finite, Size
from penstock.common.console import PATH, console, json_option, table
from penstock_bench.cli import outputs
from penstock_bench.cli.outputs import (
    output_option,
    print_headlines,
    print_remarks,
    report_option,
)
from penstock_bench.harness.running import unused
from penstock_bench.peers.gather import GATHERERS, OURS
from penstock_bench.suites.gather import gathered
from penstock_bench.suites.gather.cases import (
    CASES,
    POLICIES,
    ROWS_STEP,
    Case,
    Plan,
    cached_trace,
    table_size,
)
from penstock_bench.suites.gather.gather import Gather
from penstock_bench.workloads import row_content

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock_bench.results.results import Measurement, Results

_TABLE_BYTES, _LIMIT_BYTES_MIN = 2 << 30, 512 << 20
_CACHE_PART, _LIMIT_PART = 10, 4
_LIBRARY_BYTES = 384 << 20
"""Memory of a process beside the cache: libraries, and batches in flight."""
_OTHERS_TIMES = 2
"""The largest size of another library's files, relative to the table."""
_QUICK: dict[str, Any] = {"rows": 1 << 16, "batches": 24, "rounds": 1}


def _row_bytes(_: click.Context, __: click.Parameter, nbytes: int) -> int:
    if not row_content.ROW_BYTES_MIN <= nbytes <= 1 << 16 or nbytes % row_content.WORD_BYTES:
        raise click.BadParameter(
            f"{nbytes}: rows have {row_content.ROW_BYTES_MIN} to 65536 bytes, a multiple of"
            f" {row_content.WORD_BYTES}"
        )
    return nbytes


_CASE_NOTES = {one.name: one.note for one in CASES.values()} | {
    POLICIES: "what policies miss, with caches of several sizes"
}


@click.command(
    "gather", epilog=example("penstock bench gather /scratch --case batches --by penstock,memmap")
)
@click.argument("directory", type=PATH, default=".")
@click.option(
    "--case",
    "cases",
    metavar="LIST",
    default=",".join(_CASE_NOTES),
    callback=names_of(_CASE_NOTES),
    help=f"What is measured. [{', '.join(_CASE_NOTES)}]",
)
@click.option(
    "--by",
    "names",
    metavar="LIST",
    callback=names_of({name: entry.note for name, entry in GATHERERS.items()}),
    help="Who gathers. [those that each case is for]",
)
@click.option("--rows", type=click.IntRange(4 * ROWS_STEP), help="Of the table. [those of 2 GiB]")
@click.option(
    "--row-bytes", type=Size(), default="4096", show_default=True, callback=_row_bytes,
    help="Of a row.",
)  # fmt: skip
@click.option(
    "--batches", type=click.IntRange(1), default=96, show_default=True,
    help="Of a trace; four times as many where caches serve them.",
)  # fmt: skip
@click.option(
    "--batch-rows", type=click.IntRange(1), default=1024, show_default=True, help="Of a batch."
)
@click.option("--cache", "cache_bytes", type=Size(), help="For rows. [a tenth of the table]")
@click.option(
    "--limit", "limit_bytes", type=Size(),
    help="Memory of each process. [a quarter of the table, and what the cache takes]",
)  # fmt: skip
@click.option(
    "--law", type=click.Choice(["degree", "zipf"]), default="degree", show_default=True,
    help="How likely rows are, where caches serve them.",
)  # fmt: skip
@click.option(
    "--recurring", type=Finite(0, 1), default=0.1, show_default=True,
    help="Likewise, the part of a batch that are seeds.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--seconds", "seconds_max", type=Finite(min=0.01), default=2.0, show_default=True,
    help="For who waits for one row after the other.",
)  # fmt: skip
@click.option(
    "--timeout", type=Finite(min=1), default=600.0, show_default=True, help="Of a process."
)
@click.option("--quick", is_flag=True, help="One round, with a small table and short traces.")
@output_option
@report_option
@json_option
@click.pass_context
def bench_gather(
    context: click.Context,
    /,
    directory: Path,
    quick: bool,
    timeout: float,
    output: Path | None,
    report: Path | None,
    as_json: bool,
    **asked: Any,
) -> int:
    """Gather rows by id in DIRECTORY, from a table that does not fit into memory.

    Tables are made, and removed in the end. Each process has its memory limited by a control group,
    where one can be made, and finds nothing of its files in memory. In each round fio reads the
    same file before penstock does and after.
    """
    outputs.check_distinct(output, report)
    place = directory.absolute()
    outputs.check_directory(place)
    if quick:
        given = click.core.ParameterSource.COMMANDLINE
        asked |= {
            name: value
            for name, value in _QUICK.items()
            if context.get_parameter_source(name) is not given
        }
    plan = _planned(place, asked, timeout)
    present = _present(plan)
    _check(place, plan)
    settings = {
        "rows": plan.rows, "row_bytes": plan.row_bytes, "batches": plan.batches,
        "batch_rows": plan.batch_rows, "cache_bytes": plan.cache_bytes,
        "limit_bytes": plan.limit_bytes, "law": plan.law, "recurring": plan.recurring,
        "rounds": plan.rounds, "by": ",".join(present),
    }  # fmt: skip
    results = outputs.started("gather", place, settings)
    with outputs.reported(results, _print, output=output, report=report, as_json=as_json):
        working.worked(plan.work, lambda say: Gather(plan, results, say).run(), is_quiet=as_json)
    return int(any(one.error and one.by.startswith(OURS) for one in results.measurements))


def _planned(place: Path, asked: dict[str, Any], timeout: float) -> Plan:
    row_bytes = asked["row_bytes"]
    rows = asked.pop("rows") or _TABLE_BYTES // row_bytes
    rows = rows // ROWS_STEP * ROWS_STEP
    cache_bytes = asked.pop("cache_bytes") or rows * row_bytes // _CACHE_PART
    limit_bytes = asked.pop("limit_bytes") or max(
        _LIMIT_BYTES_MIN, rows * row_bytes // _LIMIT_PART, cache_bytes + _LIBRARY_BYTES
    )
    return Plan(
        work=unused(place), rows=rows, cache_bytes=cache_bytes, limit_bytes=limit_bytes,
        timeout_seconds=timeout, **asked,
    )  # fmt: skip


def _present(plan: Plan) -> list[str]:
    """The libraries of the cases that are installed."""
    wanted = plan.names
    if wanted is None:
        each = [CASES[name].names for name in plan.cases if name in CASES]
        wanted = list(dict.fromkeys(name for names in each for name in names))
    return outputs.installed(wanted, GATHERERS)


def _check(place: Path, plan: Plan) -> None:
    """Whether there are rows for the traces, and there is room for the files."""
    cases = [CASES[name] for name in plan.cases if name in CASES]
    traces = [case.trace(plan) for case in cases]
    if POLICIES in plan.cases:
        traces.append(cached_trace(plan, is_permuted=True))
    try:
        for trace in traces:
            trace.check()
    except ValueError as error:
        raise click.UsageError(
            f"{error}: choose more --rows, or fewer --batches or --batch-rows"
        ) from error
    needed = _needed_bytes(plan, cases)
    outputs.check_room(place, needed, "the tables with the files of others take", "fewer --rows")


def _needed_bytes(plan: Plan, cases: list[Case]) -> int:
    """Bytes of the tables, and of the files that other libraries make of them."""
    sizes = {case.table: table_size(plan, case.table) for case in cases}
    nbytes = {table: size.rows * size.row_bytes for table, size in sizes.items()}
    made = {
        (case.table, name)
        for case in cases
        for name in (case.names if plan.names is None else plan.names)
        if GATHERERS[name].has_files and GATHERERS[name].missing is None
    }
    return sum(nbytes.values()) + sum(_OTHERS_TIMES * nbytes[table] for table, _ in made)


def _print(results: Results) -> None:
    """Prints all of it."""
    out = console()
    print_headlines(results)
    settings = results.settings
    out.print(
        f"{settings['rows']:,} rows of {settings['row_bytes']} bytes, batches of"
        f" {settings['batch_rows']}, memory of {settings['limit_bytes'] / 1e6:,.0f} MB a process,"
        f" {settings['cache_bytes'] / 1e6:,.0f} MB of rows where they are kept"
    )
    if settings["rows"] * settings["row_bytes"] <= settings["limit_bytes"]:
        out.print("the table fits into that memory: what is mapped is read once")
    for case, names in gathered.gathered_cases(results).items():
        out.print()
        _print_case(results, case, names)
    if results.measurements:
        out.print(
            f"times: as fast {OURS} is; requests, read: requests a row, bytes read for each of a"
            " row; CPU s: of a million rows"
        )
    if compared := gathered.comparisons(results):
        out.print()
        rows = table("case", f"{OURS}: what, by what", "ratio", numbers=["ratio"])
        for one in compared:
            rows.add_row(one.case, one.words, " ".join(one.found.texts(gathered.ratio)).strip())
        out.print(rows)
    if (nbytes := gathered.request_bytes(results)) is not None:
        out.print(f"in the time of a random read fio reads {nbytes / 1024:.1f} KiB in order")
    if curves := gathered.miss_curves(results):
        out.print()
        _print_misses(curves)
    print_remarks(results, with_cases=True)


def _print_case(results: Results, case: str, names: list[str]) -> None:
    columns: dict[str, list[str]] = {}
    for by in names:
        for heading, text in _figures(results, case, by).items():
            columns.setdefault(heading, []).append(text)
    filled = {heading: texts for heading, texts in columns.items() if any(texts)}
    rows = table(case, *filled, numbers=list(filled))
    for by, *texts in zip(names, *filled.values(), strict=True):
        rows.add_row(by, *texts)
    console().print(rows)


def _figures(results: Results, case: str, by: str) -> dict[str, str]:
    """By heading; of one that nobody has in a case, there is no column."""

    def median(value: Callable[[Measurement], float | None]) -> str:
        found = gathered.spread_of(results, case, by, value)
        return "" if found is None else found.texts(gathered.figure)[0]

    def thousands(one: Measurement) -> float | None:
        rate = gathered.rate(one)
        return rate and rate / 1000

    rates = gathered.spread_of(results, case, by, thousands)
    times = gathered.times_of(results, case, by) if by != OURS else None
    hits = gathered.spread_of(results, case, by, gathered.hit_rate)
    return {
        "1000 rows/s": "" if rates is None else " ".join(rates.texts(gathered.figure)).strip(),
        "times": "" if times is None else times.texts(gathered.figure)[0],
        "requests": median(gathered.requests_per_row),
        "read": median(gathered.read_per_byte),
        "hits": "" if hits is None else f"{hits.median:.1%}",
        "CPU s": median(gathered.cpu_seconds_per_million),
    }


def _print_misses(curves: dict[str, dict[float, float]]) -> None:
    parts = sorted({part for curve in curves.values() for part in curve})
    headings = [f"{part:.0%}" for part in parts]
    rows = table("misses %, if kept", *headings, numbers=headings)
    for by, curve in curves.items():
        rows.add_row(by, *(f"{100 * curve[part]:.2f}" if part in curve else "" for part in parts))
    console().print(rows)
