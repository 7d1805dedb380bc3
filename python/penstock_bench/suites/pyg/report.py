"""The table of what an epoch takes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock_bench.suites.pyg.results import FIO, PEERS, PENSTOCK, ROWS, SAMPLE, TRAIN
from penstock_bench.suites.save_load.report import describe, with_range

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock_bench.suites.pyg.results import Results

_DETAILS = {
    "rows": "rows of features that it is of",
    "hits": "of them in the cache",
    "shared": "on their way for another batch",
    "read_rows": "read",
    "requests": "requests that read them",
    "group_peak_bytes": "bytes that its control group had at most",
}


def render(results: Results) -> RenderableType:
    """Everything that a run shows."""
    failed = [*results.errors(), *results.differing()]
    notes = [Text(f"  FAILED: {error}", style="bold red") for error in failed]
    notes += [Text(f"  {row}: {words}") for row, words in ROWS.items()]
    return Group(
        Text("\n".join(describe(results.machine, results.disk))),
        Text(),
        _table(results),
        *notes,
        _details(results),
        _ratios(results),
    )


def _table(results: Results) -> Table:
    told = results.settings
    sizes = {name: f"{told[f'{name}_bytes'] / 1e9:.2f} GB" for name in ("table", "cache", "memory")}
    table = Table(
        "",
        title=(
            f"{told['batches']} batches of {told['batch_size']} papers, fan-out {told['fan_out']},"
            f" {sizes['table']} of features, cache {sizes['cache']}, memory {sizes['memory']},"
            f" {told['rounds']} interleaved rounds, median [least, most]"
        ),
        title_justify="left",
        title_style="bold",
    )
    table.add_column("seconds", justify="right")
    table.add_column("of the processor", justify="right")
    for row in ROWS:
        seconds = results.spread(row)
        spent = results.spread(row, "cpu_seconds") if row != FIO else None
        cells = (with_range(one, ".3g") if one else "-" for one in (seconds, spent))
        table.add_row(row, *cells)
    return table


def _details(results: Results) -> Table:
    table = Table(f"of an epoch by {PENSTOCK}")
    table.add_column("median [least, most]", justify="right")
    for name, words in _DETAILS.items():
        if found := results.detail(PENSTOCK, name):
            table.add_row(words, with_range(found, ",.0f"))
    if found := results.detail(FIO, "iops"):
        table.add_row("random reads of 4 KiB a second, by fio", with_range(found, ",.0f"))
    return table


def _ratios(results: Results) -> Table:
    longest = Counter(row for row, _ in results.bounds().values())
    caption = "Within a round, then their median."
    if longest:
        told = ", ".join(f"{row} in {count}" for row, count in longest.most_common())
        caption += f" The longest part: {told} rounds."
    table = Table("ratio of times", caption=caption)
    table.add_column("median [least, most]", justify="right")
    table.add_column("bar", justify="right")
    if found := results.bound_ratio():
        title = f"{PENSTOCK} / max({SAMPLE}, {TRAIN}, misses / IOPS)"
        table.add_row(title, with_range(found, ".3g"), "<= 1.10")
    for row in PEERS:
        if found := results.ratio(row):
            title = f"{row} / {PENSTOCK}, {results.settings['peer_batches']} batches"
            table.add_row(title, with_range(found, ".3g"), ">= 10")
    return table
