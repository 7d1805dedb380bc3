"""Reads the figures of a table in a page, from which a chart is drawn."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent

_HEADING = re.compile(r"^#+\s+(.*)$")
_NUMBER = re.compile(r"[-\u2212]?\d[\d,]*(?:\.\d+)?")
_RANGE = re.compile(r"\[([^],]+(?:,\d{3})*), ([^]]+)\]")


@dataclass(frozen=True)
class Chart:
    """A chart: an entry of `charts.toml`.

    Attributes:
        name: The file's name without `.svg`.
        page: The page that has the table, in `docs/`.
        heading: The heading above the table.
        title: The title of the chart.
        panels: Columns drawn in a panel each, side by side.
        series: Columns drawn beside each other in one panel.
        table: Which table below the heading, from 1.
        rows: Prefixes of the labels of the rows to draw; if empty, all rows.
        ours: Labels of Penstock's rows or columns that do not contain its name.
        logarithmic: Whether the scale is logarithmic, for values of different magnitudes.
        unit: The unit of the values, if the columns do not name it.
    """

    name: str
    page: str
    heading: str
    title: str
    panels: tuple[str, ...] = ()
    series: tuple[str, ...] = ()
    table: int = 1
    rows: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    logarithmic: bool = False
    unit: str = ""

    @property
    def path(self) -> Path:
        """The file of the drawing."""
        return HERE / f"{self.name}.svg"

    def is_ours(self, label: str) -> bool:
        """Whether a row or column is Penstock's."""
        return "penstock" in label.lower() or label in self.ours


def charts() -> list[Chart]:
    """All charts, as `charts.toml` lists them."""
    entries: list[dict[str, Any]] = tomllib.loads((HERE / "charts.toml").read_text())["chart"]
    lists = ("panels", "series", "rows", "ours")
    return [
        Chart(**entry | {name: tuple(entry.get(name, ())) for name in lists}) for entry in entries
    ]


def figures(chart: Chart) -> list[dict[str, Any]]:
    """The rows of a chart's table: a label, and for each column `[value, least, most]` or None."""
    header, *rows = table_of(chart)
    columns = chart.panels or chart.series
    missing = [column for column in columns if column not in header]
    if missing:
        raise ValueError(f"{chart.name}: {chart.page} has no column {missing}, only {header}")
    found = [
        {"label": row[0]} | {column: value_of(row[header.index(column)]) for column in columns}
        for row in rows
        if not chart.rows or row[0].startswith(chart.rows)
    ]
    return [row for row in found if any(row[column] for column in columns)]


def table_of(chart: Chart) -> list[list[str]]:
    """The cells of a chart's table, the header first, without marks of emphasis."""
    lines = iter((REPOSITORY / "docs" / chart.page).read_text().splitlines())
    for line in lines:
        heading = _HEADING.match(line)
        if heading and plain(heading.group(1)) == chart.heading:
            break
    else:
        raise ValueError(f"{chart.name}: {chart.page} has no heading {chart.heading!r}")
    tables: list[list[list[str]]] = []
    is_table = False
    for line in lines:
        if _HEADING.match(line):
            break
        if line.startswith("|"):
            if not is_table:
                tables.append([])
            tables[-1].append([plain(cell) for cell in line.strip().strip("|").split("|")])
        is_table = line.startswith("|")
    if len(tables) < chart.table:
        raise ValueError(f"{chart.name}: {chart.heading!r} has {len(tables)} tables")
    header, _, *rows = tables[chart.table - 1]
    return [header, *rows]


def value_of(cell: str) -> list[float] | None:
    """A value with its measured minimum and maximum; None for a cell without a figure."""
    value = _NUMBER.match(cell)
    if value is None:
        return None
    spread = _RANGE.search(cell)
    ends = spread.groups() if spread else (value.group(), value.group())
    return [_number(text) for text in (value.group(), *ends)]


def plain(text: str) -> str:
    """Text without marks of emphasis and code."""
    return text.strip().replace("**", "").replace("`", "")


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("\N{MINUS SIGN}", "-").rstrip(" %s"))
