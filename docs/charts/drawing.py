"""Draws bars with their measured ranges, as SVG in the colours of the reader's theme."""

from __future__ import annotations

import io
import json
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib import ticker
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from docs.charts.figures import Chart

# Placeholder colours of Matplotlib, and their replacements: variable, light, dark.
_INK, _GRID, _OURS, _OTHERS, _RANGE = "#010101", "#020202", "#030303", "#040404", "#050505"
_SHADES = ("#060606", "#070707", "#080808", "#090909")
_COLOURS = {
    _INK: ("--ink", "#24292f", "#dfe3ea"),
    _GRID: ("--grid", "#d8dee4", "#3d444d"),
    _OURS: ("--ours", "#3f51b5", "#8c9eff"),
    _OTHERS: ("--others", "#aab2bd", "#6e7681"),
    _RANGE: ("--range", "#57606a", "#c9d1d9"),
    _SHADES[0]: ("--shade-1", "#8fa0b3", "#8b98a9"),
    _SHADES[1]: ("--shade-2", "#c08a4a", "#d0a46c"),
    _SHADES[2]: ("--shade-3", "#5f9a7c", "#7fbf9d"),
    _SHADES[3]: ("--shade-4", "#a06fa8", "#c394cb"),
}
_SETTINGS = {
    "font.size": 10,
    # Text stays text, in the reader's font.
    "svg.fonttype": "none",
    "svg.hashsalt": "penstock",
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}
_BAR_INCHES, _HEAD_INCHES, _WIDTH_INCHES = 0.27, 1.0, 7.4
_FIGURES = re.compile(r"<!-- figures: (.*) -->")


def draw(chart: Chart, rows: list[dict[str, Any]]) -> str:
    """A chart as SVG, with its figures in a comment."""
    with mpl.rc_context(_SETTINGS):
        columns = chart.panels or chart.series
        # Bars of several columns are thinner, with gaps between rows.
        bars = len(rows) * (len(chart.series) * 0.6 + 0.7 if chart.series else 1)
        size = (_WIDTH_INCHES, _HEAD_INCHES + _BAR_INCHES * bars + 0.25 * bool(chart.series))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(chart.panels) or 1, squeeze=False, sharey=True)[0]
        if chart.series:
            _draw_series(axes[0], chart, rows)
        else:
            for panel, column in zip(axes, chart.panels, strict=True):
                _draw_panel(panel, chart, rows, column)
        for panel in axes:
            panel.grid(axis="x", linewidth=0.8)
            panel.set_axisbelow(True)
            panel.tick_params(length=0)
            if chart.logarithmic:
                panel.set_xscale("log")
                panel.xaxis.set_minor_locator(ticker.NullLocator())
                values = [value for row in rows for column in columns if (value := row[column])]
                panel.set_xlim(left=min(value[1] for value in values) / 2)
            else:
                panel.xaxis.set_major_locator(ticker.MaxNLocator(4))
            panel.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.7g}"))
        figure.suptitle(chart.title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        axes[0].invert_yaxis()
        out = io.StringIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return _coloured(out.getvalue(), chart, rows)


def drawn(chart: Chart) -> list[dict[str, Any]] | None:
    """The figures from which a chart was drawn; None if it is not drawn."""
    if not chart.path.exists():
        return None
    found = _FIGURES.search(chart.path.read_text())
    return json.loads(found.group(1)) if found else None


def _draw_panel(panel: Axes, chart: Chart, rows: list[dict[str, Any]], column: str) -> None:
    for place, row in enumerate(rows):
        colour = _OURS if chart.is_ours(row["label"]) else _OTHERS
        _bar(panel, place, row[column], colour, 0.68)
    panel.set_yticks(range(len(rows)), [row["label"] for row in rows])
    panel.set_xlabel(f"{column} {chart.unit}".strip())


def _draw_series(panel: Axes, chart: Chart, rows: list[dict[str, Any]]) -> None:
    others = iter(_SHADES)
    height = 0.8 / len(chart.series)
    for number, column in enumerate(chart.series):
        is_ours = chart.is_ours(column)
        colour = _OURS if is_ours else next(others)
        for place, row in enumerate(rows):
            shift = (number - (len(chart.series) - 1) / 2) * height
            _bar(panel, place + shift, row[column], colour, height * 0.9)
        panel.barh([0], [0], color=colour, label=column)
    panel.set_yticks(range(len(rows)), [row["label"] for row in rows])
    panel.set_xlabel(chart.unit)
    panel.figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)


def _bar(panel: Axes, place: float, value: list[float] | None, colour: str, height: float) -> None:
    if value is None:
        return
    middle, least, most = value
    panel.barh([place], [middle], height=height, color=colour)
    if least != most:
        panel.hlines(place, least, most, color=_RANGE, linewidth=1.3)


def _coloured(svg: str, chart: Chart, rows: list[dict[str, Any]]) -> str:
    for placeholder, (name, _, _) in _COLOURS.items():
        svg = svg.replace(placeholder, f"var({name})")
    light = "".join(f"{name}:{light};" for name, light, _ in _COLOURS.values())
    dark = "".join(f"{name}:{dark};" for name, _, dark in _COLOURS.values())
    style = (
        f"<title>{chart.title}</title>\n<style>:root{{{light}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "text{font-family:system-ui,sans-serif!important}</style>\n"
    )
    start = svg.index("<svg")
    # After the opening tag; a page needs nothing before it.
    inside = svg.index(">", start) + 1
    text = f"{svg[start:inside]}\n<!-- figures: {json.dumps(rows)} -->\n{style}{svg[inside:]}"
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
