"""The table of what moves tensors how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock_bench.suites.offload.results import (
    DEEPSPEED,
    DEEPSPEED_PLAIN,
    FIO,
    LATENCY,
    PENSTOCK,
    PENSTOCK_PLAIN,
    PENSTOCK_REUSED,
    ROWS,
)
from penstock_bench.suites.save_load.report import describe, with_range

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock_bench.suites.offload.results import Results

_RATES, _PROCESSOR = "gb_per_second", "cpu_seconds_per_gb"


def render(results: Results) -> RenderableType:
    """Everything that a run shows."""
    notes = [Text(f"  FAILED: {error}", style="bold red") for error in results.errors()]
    notes += [Text(f"  {row}: {words}") for row, words in ROWS.items()]
    notes += [Text(f"  deepspeed, {one}: {words}") for one, words in results.best.items()]
    return Group(
        Text("\n".join(describe(results.machine, results.disk))),
        Text(),
        _table(results, "GB/s", _RATES),
        Text(),
        _table(results, "processor seconds per GB", _PROCESSOR),
        *notes,
        _ratios(results),
    )


def _table(results: Results, unit: str, what: str) -> Table:
    size, rounds = results.settings["size_bytes"] / 1e9, results.settings["rounds"]
    operations = [one for one in results.operations if one != LATENCY]
    table = Table(
        "",
        title=f"{unit}: {size:.2f} GB, {rounds} interleaved rounds, median [least, most]",
        title_justify="left",
        title_style="bold",
    )
    for operation in operations:
        table.add_column(operation, justify="right")
    for row in ROWS:
        found = [results.spread(row, operation, what) for operation in operations]
        table.add_row(row, *(with_range(one, ".3g") if one else "-" for one in found))
    return table


def _ratios(results: Results) -> Table:
    table = Table("ratio", "of", caption="Within a round, then their median.")
    table.add_column("median [least, most]", justify="right")
    for operation in results.operations:
        for upper, lower in (
            (PENSTOCK, DEEPSPEED),
            (PENSTOCK, FIO),
            (PENSTOCK_REUSED, FIO),
            (PENSTOCK_PLAIN, DEEPSPEED_PLAIN),
        ):
            for what, words in ((_RATES, operation), (_PROCESSOR, f"{operation}, processor")):
                if operation == LATENCY and what == _PROCESSOR:
                    continue
                kind = "seconds" if operation == LATENCY else what
                found = results.ratio(operation, upper, lower, kind)
                if found:
                    table.add_row(f"{upper} / {lower}", words, with_range(found, ".3g"))
    for row in (PENSTOCK, FIO):
        waits = results.spread(row, LATENCY, "seconds")
        if waits:
            table.add_row(row, "microseconds of a 4 KiB read", f"{waits.median * 1e6:.1f}")
    return table
