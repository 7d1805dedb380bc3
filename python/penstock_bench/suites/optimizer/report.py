"""The table of what a step costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock_bench.suites.optimizer.results import (
    COPY,
    FIO_BOTH,
    FIO_READ,
    FIO_WRITE,
    PENSTOCK,
    ROWS,
    SAVE,
    STEPPERS,
    ZERO,
    ZERO_OURS,
)
from penstock_bench.suites.save_load.report import describe, with_range

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock_bench.suites.optimizer.results import Results


def render(results: Results) -> RenderableType:
    """Everything that a run shows."""
    notes = [Text(f"  FAILED: {error}", style="bold red") for error in results.errors()]
    notes += [Text(f"  {row}: {words}") for row, words in ROWS.items()]
    state_bytes = results.settings["state_bytes"]
    share = results.save_bytes / state_bytes
    notes.append(Text(f"  a save wrote {results.save_bytes} bytes, {share:.2e} of the state"))
    return Group(
        Text("\n".join(describe(results.machine, results.disk))),
        Text(),
        _table(results),
        *notes,
        _ratios(results),
    )


def _table(results: Results) -> Table:
    size, rounds = results.settings["state_bytes"] / 1e9, results.settings["rounds"]
    table = Table(
        "",
        title=f"state of {size:.2f} GB, {rounds} interleaved rounds, median [least, most]",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("seconds", justify="right")
    table.add_column("of the processor", justify="right")
    for row in ROWS:
        seconds = results.spread(row)
        spent = results.spread(row, "cpu_seconds") if row in STEPPERS else None
        cells = (with_range(one, ".3g") if one else "-" for one in (seconds, spent))
        table.add_row(row, *cells)
    return table


def _ratios(results: Results) -> Table:
    table = Table("ratio of times", caption="Within a round, then their median.")
    table.add_column("median [least, most]", justify="right")
    pairs = [
        (ZERO, PENSTOCK),
        (ZERO_OURS, PENSTOCK),
        (PENSTOCK, FIO_BOTH),
        (FIO_BOTH, FIO_READ),
        (FIO_BOTH, FIO_WRITE),
        (COPY, SAVE),
    ]
    for upper, lower in pairs:
        if found := results.ratio(upper, lower):
            table.add_row(f"{upper} / {lower}", with_range(found, ".3g"))
    if found := results.bound_ratio():
        table.add_row(f"{PENSTOCK} / max({FIO_READ}, {FIO_WRITE})", with_range(found, ".3g"))
    return table
