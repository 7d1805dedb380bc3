"""The table of what it costs to write rows anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock_bench.suites.save_load.report import describe, with_range
from penstock_bench.suites.updates.results import TABLE, WRITERS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock_bench.suites.updates.results import Results


def render(results: Results) -> RenderableType:
    """Everything that a run shows."""
    settings = results.settings
    table = Table(
        "",
        title=f"{settings['row_bytes']}-byte rows at random of {settings['rows']:,}, a flush every"
        f" {settings['batches'] * settings['batch_rows']:,}; {settings['rounds']} interleaved"
        " rounds, median [least, most]",
        title_justify="left",
        title_style="bold",
    )
    for column in ("rows a second", "s of processor a million", "the table writes, times as many"):
        table.add_column(column, justify="right")
    for writer in WRITERS:
        found = (
            (results.spread(writer), ",.0f"),
            (results.spread(writer, "cpu_seconds"), ".3g"),
            (results.ratio(writer) if writer != TABLE else None, ".3g"),
        )
        table.add_row(writer, *(with_range(one, form) if one else "-" for one, form in found))
    notes = [Text(f"  FAILED: {error}", style="bold red") for error in results.errors()]
    notes += [Text(f"  {writer}: {words}") for writer, words in WRITERS.items()]
    folded = results.spread(TABLE, "fold_seconds")
    if folded:
        notes.append(Text(f"  to fold them takes {with_range(folded, '.3g')} s"))
    notes.append(Text(f"  memory: {settings['memory']}"))
    lines = Text("\n".join(describe(results.machine, results.disk)))
    return Group(lines, Text(), table, *notes)
