"""Drawings, by Matplotlib: in the light colours of the palette, on no ground."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from penstock_bench.report.inline import inline
from penstock_bench.report.lines import Line, Panel, shortened
from penstock_bench.report.palette import COLOURS, SERIES
from penstock_bench.results.results import latencies, percent

if TYPE_CHECKING:
    from collections.abc import Callable

    from markupsafe import Markup

    from penstock_bench.report.grids import Grid
    from penstock_bench.results.results import Measurement, Results

BUCKET_SECONDS = 0.1
"""A step of a timeline (`crates/bench`, `outcome.rs`)."""

BUCKETS_MIN = 4
"""With fewer, a measurement was too short to have a course."""

STEPS_MAX = 150
"""Of one line: more would be narrower than a line is wide."""

WIDTH_INCHES, _HEIGHT_INCHES = 5.6, 2.7
_LEGEND_ROW_INCHES = 0.19
_LABEL_CHARACTERS_BESIDE = 32
"""The longest label that leaves room for another one beside it in a legend."""

_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = "os^DvXP*"
_CELL_COLUMNS_MAX = 12
"""With more columns a number does not fit into a cell of the heat map."""

_ON_DARK, _ON_LIGHT = "#fefefe", "#010101"
"""Of numbers in cells: none of the palette, as cells are the same on a dark page."""

SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8.5,
    # Letters stay letters: sharp at any size, and found by a search.
    "svg.fonttype": "none",
    # Names of parts do not change from run to run.
    "svg.hashsalt": "penstock",
    # A label may hold dollar signs.
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": COLOURS["rule"].light,
    "grid.linewidth": 0.6,
    "axes.edgecolor": COLOURS["muted"].light,
    "axes.linewidth": 0.6,
    "xtick.color": COLOURS["muted"].light,
    "ytick.color": COLOURS["muted"].light,
    "xtick.labelcolor": COLOURS["ink"].light,
    "ytick.labelcolor": COLOURS["ink"].light,
    "text.color": COLOURS["ink"].light,
    "axes.labelcolor": COLOURS["ink"].light,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
}


def timeline(results: Results, panel: Panel, name: str) -> Markup | None:
    """GB/s over time, of the measurement with the median rate of each line."""
    drawn = []
    for line in panel.lines:
        measured = sorted(
            (one for one in results.of(line.case, line.by) if one.nbytes and one.seconds),
            key=lambda one: one.nbytes / one.seconds,
        )
        if measured:
            drawn.append((line, *_course(measured[len(measured) // 2])))

    def draw(axes: Any) -> None:
        for line, edges, rates in drawn:
            # The ends of what was short are all that is seen of it.
            every = 1 if len(edges) == 2 else 0.15
            axes.plot(edges, rates, drawstyle="steps-post", **_look(line), markevery=every)
        axes.set(xlabel="seconds", ylabel="GB/s")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)

    label = f"Throughput over time, {panel.title}: GB/s in each step of time"
    return lined(panel, [line for line, *_ in drawn], draw, name, label)


def has_course(one: Measurement) -> bool:
    """Whether more is known of a measurement than how long it took."""
    return len(one.timeline_bytes) >= BUCKETS_MIN


def _course(one: Measurement) -> tuple[list[float], list[float]]:
    """When each step of a measurement began, and its rate; the last rate stands twice, at its end.

    The last step is seldom whole, so it is counted together with the one before. A measurement
    without a timeline is drawn at its mean.
    """
    if not has_course(one):
        return [0.0, one.seconds], [one.gb_per_second] * 2
    buckets = -(-len(one.timeline_bytes) // STEPS_MAX)
    step_seconds = BUCKET_SECONDS * buckets
    starts = range(0, len(one.timeline_bytes), buckets)
    *whole, before, last = [sum(one.timeline_bytes[at : at + buckets]) for at in starts]
    edges = [step_seconds * index for index in range(len(whole) + 1)]
    remaining = max(BUCKET_SECONDS, one.seconds - edges[-1])
    rates = [nbytes / step_seconds / 1e9 for nbytes in whole]
    rates.append((before + last) / remaining / 1e9)
    return [*edges, edges[-1] + remaining], [*rates, rates[-1]]


def latency(results: Results, panel: Panel, name: str) -> Markup | None:
    """Microseconds by percentile, medians over the rounds."""
    found = {
        line: values
        for line in panel.lines
        if len(values := latencies(results, line.case, line.by)) > 1
    }
    named = {percentile for values in found.values() for percentile in values}
    percentiles = sorted(named - {"mean"}, key=percent)

    def draw(axes: Any) -> None:
        for line, values in found.items():
            present = [one for one in percentiles if values.get(one, 0) > 0]
            positions = [percentiles.index(one) for one in present]
            axes.plot(positions, [values[one] for one in present], **_look(line))
        axes.set_xticks(range(len(percentiles)), percentiles)
        axes.set(xlabel="percentile", ylabel="µs", yscale="log")
        lowest, highest = axes.get_ylim()
        # Where there is little between the ends, powers of ten alone would be one mark or none.
        steps = (1.0,) if highest / lowest > 1000 else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=steps))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())

    label = f"Latency by percentile, {panel.title}: microseconds, on a logarithmic axis"
    return lined(panel, list(found), draw, name, label)


def heat_map(grid: Grid, name: str) -> Markup:
    """GB/s of every cell, in colour and in figures."""
    rates = np.array(grid.rates, dtype=float)
    height = 0.9 + 0.3 * len(grid.rows)
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots()
        # Not an image, which would be a picture of pixels within the drawing.
        mesh = axes.pcolormesh(np.ma.masked_invalid(rates), cmap="cividis", vmin=0, linewidth=0.3)
        mesh.update_scalarmappable()
        shades = np.asarray(mesh.get_facecolor()).reshape(*rates.shape, 4)
        for (row, column), rate in np.ndenumerate(rates):
            if np.isnan(rate) or len(grid.columns) > _CELL_COLUMNS_MAX:
                continue
            # Rec. 709, as the eye weighs the colours.
            is_dark = shades[row, column, :3] @ (0.2126, 0.7152, 0.0722) < 0.46
            axes.text(
                column + 0.5, row + 0.5, f"{rate:.2f}" if rate >= 0.1 else f"{rate:.3f}",
                ha="center", va="center", fontsize=8, color=_ON_DARK if is_dark else _ON_LIGHT,
            )  # fmt: skip
        axes.set_xticks(np.arange(len(grid.columns)) + 0.5, grid.columns)
        axes.set_yticks(np.arange(len(grid.rows)) + 0.5, grid.rows)
        axes.set(xlabel=grid.column_name, ylabel=grid.row_name)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        what = f"GB/s by {grid.row_name} and {grid.column_name}, {grid.title}"
        return inline(figure, name=name, label=what)


def hit_curves(curves: dict[str, dict[float, float]], name: str) -> Markup:
    """Per cent of rows that are there, by the per cent of the table that is kept.

    Args:
        curves: Of each policy, the part that is not there by the part that is kept.
        name: What no other drawing of the page is called.
    """
    lines = [Line("", by, by, index, 0) for index, by in enumerate(curves)]

    def draw(axes: Any) -> None:
        for line, curve in zip(lines, curves.values(), strict=True):
            parts = sorted(curve)
            hits = [100 * (1 - curve[part]) for part in parts]
            axes.plot([100 * part for part in parts], hits, **_look(line))
        parts = sorted({100 * part for curve in curves.values() for part in curve})
        axes.set(xlabel="% of the table that is kept", ylabel="hits, %", xscale="log")
        axes.set_xticks(parts, [f"{part:g}" for part in parts])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.set_ylim(bottom=0)

    drawn = lined(Panel("", lines, [], ""), lines, draw, name, "Hits by what is kept, in per cent")
    if drawn is None:
        raise AssertionError("there are curves")
    return drawn


def lined(
    panel: Panel, lines: list[Line], draw: Callable[[Any], None], name: str, label: str
) -> Markup | None:
    """A plot with its legend below it, where no line is hidden; None without a line."""
    if not lines:
        return None
    with mpl.rc_context(SETTINGS):
        handles = _handles(panel, lines)
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = 1 if longest > _LABEL_CHARACTERS_BESIDE else 2
        rows = -(-len(handles) // columns)
        height = _HEIGHT_INCHES + _LEGEND_ROW_INCHES * rows
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        draw(figure.subplots())
        figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=columns,
            frameon=False,
            handlelength=2.6,
        )
        return inline(figure, name=name, label=label)


def _handles(panel: Panel, lines: list[Line]) -> list[Line2D]:
    """The legend: first the colours, then the kinds of dashes."""
    colours = {line.colour_index: line for line in lines}
    handles = [
        Line2D([], [], color=colour(line), marker=_marker(line), label=shortened(line.colour_label))
        for line in colours.values()
    ]
    dashes = {line.dash_index for line in lines}
    return handles + [
        Line2D([], [], color=COLOURS["ink"].light, linestyle=_dash(index), label=shortened(by))
        for index, by in enumerate(panel.names)
        if index in dashes
    ]


def _look(line: Line) -> dict[str, Any]:
    return {
        "color": colour(line),
        "marker": _marker(line),
        "linestyle": _dash(line.dash_index),
    }


def colour(line: Line) -> str:
    """The colour of a line, or of its bars."""
    return SERIES[line.colour_index].light


def _marker(line: Line) -> str:
    return _MARKERS[line.colour_index]


def _dash(index: int) -> Any:
    return _DASHES[index % len(_DASHES)]
