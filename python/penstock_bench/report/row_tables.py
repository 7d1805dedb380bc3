"""The tables of a page about rows by id: rates, ratios, and what caches miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock_bench.peers.gather import OURS
from penstock_bench.report.tables import NOTHING, Cell, Table
from penstock_bench.suites.gather import gathered

if TYPE_CHECKING:
    from penstock_bench.results.results import Measurement, Results


def row_tables(results: Results) -> list[Table]:
    """All of them that there is something for."""
    made = [_rows(results), _comparisons(results), _misses(results)]
    return [table for table in made if table.rows]


def _rows(results: Results) -> Table:
    """Of rows by id."""
    rates = gathered.row_rates(results)

    def hits(one: Measurement) -> float | None:
        found = gathered.hit_rate(one)
        return found and 100 * found

    def cells(case: str, by: str) -> list[Cell]:
        times = None if by == OURS else gathered.times_of(results, case, by)
        ranges = [
            gathered.spread_of(results, case, by, gathered.rate),
            times,
            *(
                gathered.spread_of(results, case, by, value)
                for value in (
                    gathered.requests_per_row,
                    gathered.read_per_byte,
                    hits,
                    gathered.cpu_seconds_per_million,
                )
            ),
        ]
        return [
            Cell(NOTHING) if found is None else Cell(*found.texts(gathered.figure))
            for found in ranges
        ]

    note = (
        f"Medians of all rounds [least, most]; times: as fast {OURS} is, round by round; read:"
        " bytes from storage for each byte of the rows, as the kernel counts them."
    )
    columns = ["rows/s", "times", "requests a row", "read", "hits %", "CPU s a million rows"]
    rows = {case: {by: cells(case, by) for by in some} for case, some in rates.items()}
    return Table("Rows", note, columns, [], rows).without_empty_columns()


def _comparisons(results: Results) -> Table:
    """Of rows by id, ours by others."""
    rows: dict[str, dict[str, list[Cell]]] = {}
    for one in gathered.comparisons(results):
        rows.setdefault(one.case, {})[one.words] = [Cell(*one.found.texts(gathered.ratio))]
    note = f"{OURS} by another one, round by round [least, most]; of caches, over their sizes."
    return Table("Ratios", note, ["ratio"], [], rows)


def _misses(results: Results) -> Table:
    """Of caches, by policy."""
    curves = gathered.miss_curves(results)
    parts = sorted({part for curve in curves.values() for part in curve})
    rows = {
        by: {
            "misses %": [
                Cell(f"{100 * curve[part]:.2f}" if part in curve else NOTHING) for part in parts
            ]
        }
        for by, curve in curves.items()
    }
    note = "Of rows that were asked for, by the part of the table that is kept."
    return Table("Misses", note, [f"{part:.0%}" for part in parts], [], rows)
