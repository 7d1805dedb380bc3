"""Rates over two settings: block by depth, block by threads, whichever two vary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock_bench.harness.cases import size
from penstock_bench.report.lines import durable_rate, measurers, plain, told_apart

if TYPE_CHECKING:
    from penstock_bench.results.results import Results

AXES = {
    "block_bytes": "block",
    "depth": "requests in flight",
    "threads": "threads",
    "processes": "processes",
}


class Grid(NamedTuple):
    """Cases that differ in two settings only.

    Attributes:
        title: What they have in common.
        row_name: The setting of rows.
        column_name: The setting of columns.
        rows: Its values, ascending.
        columns: Its values, ascending.
        rates: GB/s by row and column; None where there is no case.
    """

    title: str
    row_name: str
    column_name: str
    rows: list[str]
    columns: list[str]
    rates: list[list[float | None]]


def grids(results: Results) -> list[Grid]:
    """One for each combination of the other settings; of who measured first."""
    by = next(iter(measurers(results)), "")
    measured = {
        case: settings
        for case, settings in results.cases.items()
        if settings.keys() >= AXES.keys() and durable_rate(results, case, by) is not None
    }
    values = {axis: {settings[axis] for settings in measured.values()} for axis in AXES}
    varying = [axis for axis in AXES if len(values[axis]) > 1]
    chosen = sorted(varying, key=lambda axis: -len(values[axis]))[:2]
    if len(chosen) < 2:
        return []
    row_axis, column_axis = (axis for axis in AXES if axis in chosen)
    groups: dict[str, list[str]] = {}
    for case, settings in measured.items():
        others = {name: value for name, value in settings.items() if name not in chosen}
        groups.setdefault(repr(sorted(others.items())), []).append(case)
    found = []
    for cases in groups.values():
        cells = {
            (measured[case][row_axis], measured[case][column_axis]): durable_rate(results, case, by)
            for case in cases
        }
        rows, columns = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
        if min(len(rows), len(columns)) < 2:
            continue
        fixed = [axis for axis in varying if axis not in chosen]
        same = [f"{AXES[axis]}: {_text(axis, measured[cases[0]][axis])}" for axis in fixed]
        found.append(
            Grid(
                plain(", ".join([told_apart(cases)[1], *same])),
                AXES[row_axis],
                AXES[column_axis],
                [_text(row_axis, row) for row in rows],
                [_text(column_axis, column) for column in columns],
                [[cells.get((row, column)) for column in columns] for row in rows],
            )
        )
    return found


def _text(axis: str, value: Any) -> str:
    return size(value) if axis == "block_bytes" else str(value)
