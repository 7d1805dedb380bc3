"""Rows by id on the terminal: a table for each case, ratios, and what caches miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.common.console import console, table
from penstock_bench.cli.outputs import print_headlines, print_remarks
from penstock_bench.peers.gather import OURS
from penstock_bench.suites.gather import gathered

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_bench.results.results import Measurement, Results


def print_results(results: Results) -> None:
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
