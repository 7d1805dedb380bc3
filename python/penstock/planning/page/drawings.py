"""Drawings of advice, by Matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from penstock.common.page.inline import inline
from penstock.common.page.palette import COLOURS, SERIES
from penstock.common.page.style import SETTINGS
from penstock.planning import shown
from penstock.planning.models.units import SECONDS, show_bytes, show_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from markupsafe import Markup

    from penstock.planning.advice import Advice

_WIDTH_INCHES, _HEIGHT_INCHES = 5.6, 3.0

_POINTS = 200

_BESIDE = 12.0
"""Intervals drawn reach from the advice divided by this to the advice times this."""

_LOSSES = (("saving", 1), ("lost", 0), ("down", 3), ("restarting", 4))
"""Parts of the lost time from bottom to top: the field of `Shares` and the colour."""

_NAMES = {
    "saving": "saving",
    "lost": "work lost to failures",
    "down": "waiting for restarts",
    "restarting": "restarting",
}

_SECONDS_PER_DAY = 86_400

_TIMES = tuple(
    value * SECONDS[unit]
    for unit, values in {
        "ms": (1, 10, 100),
        "s": (1, 5, 15, 60),
        "min": (5, 15, 30, 60),
        "h": (2, 4, 12),
        "d": (1, 3, 7, 30, 90),
        "y": (1, 3, 10, 30, 100, 300, 1000),
    }.items()
    for value in values
)
"""Times at which an axis may have a mark, in seconds."""


class Drawing(NamedTuple):
    """A drawing with its caption."""

    title: str
    note: str
    svg: Markup


def drawings(advice: Advice, others: Sequence[Advice]) -> Iterator[Drawing]:
    """All drawings of a page, in their order; those of unknown numbers are left out."""
    yield _lost_time(advice)
    yield _parts(advice)
    if advice.training.save_bytes is not None:
        yield _written(advice)
    if advice.drive_days is not None:
        yield _drive_life(advice)
    if others:
        yield _by_nodes(advice, others)


def _lost_time(advice: Advice) -> Drawing:
    periods = _periods(advice)
    found = [advice.shares_at(period) for period in periods]

    def draw(axes: Any) -> None:
        parts = [[100 * getattr(one, name) for one in found] for name, _ in _LOSSES]
        axes.stackplot(
            periods,
            *parts,
            labels=[_NAMES[name] for name, _ in _LOSSES],
            colors=[SERIES[colour].light for _, colour in _LOSSES],
            linewidth=0,
        )
        best = 100 * (1 - advice.shares.goodput)
        # Far from the advice everything is lost: the valley is what is read.
        axes.set_ylim(0, min(100.0, max(3.5 * best, best + 1)))
        _mark(axes, advice)
        axes.set(ylabel="% of the time")
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], labels[::-1], loc="upper center", framealpha=0.85,
            facecolor=COLOURS["paper"].light, edgecolor="none",
        )  # fmt: skip

    note = "by the interval between saves; the line is the advice, the band its range"
    return Drawing("Lost time", note, _drawn(draw, "lost", "Lost time by interval, in per cent"))


def _parts(advice: Advice) -> Drawing:
    named = shown.parts(advice)[1:]
    values = [100 * share for _, share in named]

    def draw(axes: Any) -> None:
        colours = [SERIES[colour].light for _, colour in _LOSSES]
        axes.barh(range(len(values)), values, height=0.65, color=colours)
        for place, value in enumerate(values):
            axes.annotate(
                f"{value:.2g} %", (value, place), xytext=(5, 0), textcoords="offset points",
                va="center", fontsize=8.5,
            )  # fmt: skip
        axes.set_yticks(range(len(values)), [name for name, _ in named])
        axes.invert_yaxis()
        axes.set(xlabel="% of the time")
        axes.set_xlim(0, 1.2 * max(max(values), 1e-3))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)

    note = (
        f"with the advised interval; the other {advice.shares.goodput:.1%} is training that counts"
    )
    return Drawing("Parts of the lost time", note, _drawn(draw, "parts", "Parts of the lost time"))


def _written(advice: Advice) -> Drawing:
    size = advice.inputs["save_bytes"].value
    periods = _periods(advice)

    def draw(axes: Any) -> None:
        axes.plot(periods, size * _SECONDS_PER_DAY / periods, color=SERIES[0].light)
        axes.set(yscale="log", ylabel="bytes a day")
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: show_bytes(value)))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        _mark(axes, advice)

    note = "by the interval between saves"
    return Drawing("Bytes written a day", note, _drawn(draw, "written", "Bytes a day by interval"))


def _drive_life(advice: Advice) -> Drawing:
    periods = _periods(advice)
    days = (advice.drive_days or 0.0) * periods / advice.interval.value

    def draw(axes: Any) -> None:
        axes.plot(periods, days * _SECONDS_PER_DAY, color=SERIES[2].light)
        axes.set(yscale="log", ylabel="endurance used up in")
        _mark_times(axes.yaxis, *axes.get_ylim())
        _mark(axes, advice)

    note = "by the interval between saves"
    return Drawing("Life of the drives", note, _drawn(draw, "drives", "Drive life by interval"))


def _by_nodes(advice: Advice, others: Sequence[Advice]) -> Drawing:
    rows = sorted(
        {one.cluster.nodes or 0: one for one in (advice, *others)}.items(), key=lambda row: row[0]
    )

    def draw(axes: Any) -> None:
        places = range(len(rows))
        below = np.zeros(len(rows))
        for name, colour in (("goodput", 2), *_LOSSES):
            values = np.array([100 * getattr(one.shares, name) for _, one in rows])
            label = _NAMES.get(name, "training that counts")
            axes.bar(
                places, values, bottom=below, width=0.7, color=SERIES[colour].light, label=label
            )
            below += values
        axes.set_xticks(
            places, [f"{nodes:,}\n{show_seconds(one.interval.value)}" for nodes, one in rows]
        )
        axes.set(xlabel="nodes, and their interval", ylabel="% of the time")
        axes.set_ylim(0, 100)
        axes.grid(visible=False, axis="x")
        axes.figure.legend(loc="outside lower left", ncols=2, frameon=False)

    note = "each with its own best interval"
    return Drawing("Other numbers of nodes", note, _drawn(draw, "nodes", "Shares of time by nodes"))


def _periods(advice: Advice) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Intervals in seconds, the same distance apart on a logarithmic axis."""
    low, high = advice.interval.bounds
    first = max(advice.period_min, min(low, advice.interval.value / _BESIDE))
    return np.geomspace(first, max(high, advice.interval.value * _BESIDE), _POINTS)


def _mark(axes: Any, advice: Advice) -> None:
    """Marks the advised interval and its range, and labels the axis of intervals."""
    ink = COLOURS["ink"].light
    axes.axvspan(*advice.interval.bounds, color=ink, alpha=0.12, linewidth=0)
    axes.axvline(advice.interval.value, color=ink, linestyle=(0, (4, 1.6)), linewidth=1)
    periods = _periods(advice)
    axes.set(xscale="log", xlabel="interval between saves")
    axes.set_xlim(periods[0], periods[-1])
    _mark_times(axes.xaxis, periods[0], periods[-1])


def _mark_times(axis: Any, low: float, high: float) -> None:
    """Marks times with short names on an axis in seconds; the ends if there are none."""
    inside = [one for one in _TIMES if low <= one <= high]
    axis.set_major_locator(ticker.FixedLocator(inside if len(inside) > 1 else [low, high]))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: show_seconds(value)))
    axis.set_minor_locator(ticker.NullLocator())


def _drawn(draw: Callable[[Any], None], name: str, label: str) -> Markup:
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
        draw(figure.subplots())
        return inline(figure, name=name, label=label)
