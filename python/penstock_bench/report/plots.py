"""Drawings, by Matplotlib: in the light colours of the palette, on no ground."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from penstock.common.page.inline import inline
from penstock.common.page.palette import COLOURS, SERIES
from penstock.common.page.style import SETTINGS
from penstock_bench.report.lines import Line, Panel, durable_rates, shortened
from penstock_bench.results.results import latencies, percent
from penstock_bench.suites.gather.gathered import figure as digits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from markupsafe import Markup

    from penstock_bench.report.lines import Grid, Passes
    from penstock_bench.results.results import Measurement, Results

BUCKET_SECONDS = 0.1
"""A step of a timeline (`crates/bench`, `outcome.rs`)."""

BUCKETS_MIN = 4
"""With fewer, a measurement was too short to have a course."""

STEPS_MAX = 150
"""Of one line: more would be narrower than a line is wide."""

_WIDTH_INCHES, _HEIGHT_INCHES = 5.6, 2.7
_LEGEND_ROW_INCHES = 0.19
_LABEL_CHARACTERS_BESIDE = 32
"""The longest label that leaves room for another one beside it in a legend."""

BARS_MAX = 40
"""Of one drawing: what somebody may look at."""

_BAR_INCHES = 0.3

_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = "os^DvXP*"
_CELL_COLUMNS_MAX = 12
"""With more columns a number does not fit into a cell of the heat map."""

_ON_DARK, _ON_LIGHT = "#fefefe", "#010101"
"""Of numbers in cells: none of the palette, as cells are the same on a dark page."""


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
    return _lined(panel, [line for line, *_ in drawn], draw, name, label)


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
    return _lined(panel, list(found), draw, name, label)


def heat_map(grid: Grid, name: str) -> Markup:
    """GB/s of every cell, in colour and in figures."""
    rates = np.array(grid.rates, dtype=float)
    height = 0.9 + 0.3 * len(grid.rows)
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
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

    A curve is the part that is not there by the part that is kept.
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

    drawn = _lined(Panel("", lines, [], ""), lines, draw, name, "Hits by what is kept, in per cent")
    if drawn is None:
        raise AssertionError("there are curves")
    return drawn


def _lined(
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
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
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
        Line2D(
            [], [], color=_colour(line), marker=_marker(line), label=shortened(line.colour_label)
        )
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
        "color": _colour(line),
        "marker": _marker(line),
        "linestyle": _dash(line.dash_index),
    }


def _colour(line: Line) -> str:
    """The colour of a line, or of its bars."""
    return SERIES[line.colour_index].light


def _marker(line: Line) -> str:
    return _MARKERS[line.colour_index]


def _dash(index: int) -> Any:
    return _DASHES[index % len(_DASHES)]


class Bar(NamedTuple):
    """One of them.

    No value stands for no result; those of Penstock are to be seen first.
    """

    label: str
    values: Sequence[float]
    is_ours: bool = True


def bars(
    made: Sequence[Bar], name: str, *, label: str, unit: str, most: float | None = None
) -> Markup:
    """A bar of each, in their order.

    The name is that of no other drawing of the page; the label is for who cannot see it; a
    dashed line is at the most that is possible.
    """
    medians = np.array([np.median(bar.values) if bar.values else 0.0 for bar in made])
    ends = np.array([(min(bar.values), max(bar.values)) if bar.values else (0, 0) for bar in made])
    with mpl.rc_context(SETTINGS):
        drawing = Figure(
            figsize=(_WIDTH_INCHES, 0.75 + _BAR_INCHES * len(made)), layout="constrained"
        )
        axes = drawing.subplots()
        axes.barh(
            range(len(made)),
            medians,
            height=0.7,
            color=[SERIES[0].light if bar.is_ours else COLOURS["muted"].light for bar in made],
            # Of one round there is no spread.
            xerr=np.where(medians == ends.T, np.nan, np.abs(ends.T - medians))
            if any(len(bar.values) > 1 for bar in made)
            else None,
            error_kw={"ecolor": COLOURS["ink"].light, "elinewidth": 0.9, "capsize": 2.5},
        )
        for place, bar in enumerate(made):
            axes.annotate(
                digits(float(medians[place])) if bar.values else "no result",
                (float(ends[place].max()), place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
        if most is not None:
            axes.axvline(most, color=COLOURS["ink"].light, linestyle=(0, (4, 1.6)), linewidth=1)
        axes.set_yticks(range(len(made)), [shortened(bar.label) for bar in made])
        axes.set_ylim(len(made) - 0.4, -0.6)
        # Room for the figures.
        axes.set_xlim(0, 1.16 * max(float(ends.max(initial=0.0)), most or 0.0) or 1.0)
        axes.set(xlabel=unit)
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        return inline(drawing, name=name, label=label)


def pass_bars(results: Results, passes: Passes, name: str) -> Markup | None:
    """GB/s of each pass, a bar for each of those who measured: the mean, and the range."""
    numbers = sorted(passes.cases)
    drawn = {
        line: {
            number: rates
            for number in numbers
            if (rates := durable_rates(results, passes.cases[number], line.by))
        }
        for line in passes.panel.lines
    }
    width = 0.8 / len(drawn)

    def draw(axes: Any) -> None:
        for index, (line, found) in enumerate(drawn.items()):
            shift = (index - (len(drawn) - 1) / 2) * width
            means = np.array([np.mean(rates) for rates in found.values()])
            ends = np.array([(min(rates), max(rates)) for rates in found.values()])
            axes.bar(
                [numbers.index(number) + shift for number in found],
                means,
                width=0.92 * width,
                color=_colour(line),
                yerr=np.abs(ends.T - means),
                error_kw={"ecolor": COLOURS["ink"].light, "elinewidth": 0.8},
            )
        axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
        axes.set(xlabel="pass", ylabel="GB/s")
        axes.grid(visible=False, axis="x")

    title = passes.panel.title
    return _lined(passes.panel, list(drawn), draw, name, f"GB/s of each pass, {title}")
