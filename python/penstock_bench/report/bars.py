"""Bars: the median of the rounds of each, with the least and the most.

Everything that was asked for is there: what is too small to be seen has its figure beside it, and
what has no result says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from penstock_bench.report.inline import inline
from penstock_bench.report.lines import durable_rates, shortened
from penstock_bench.report.palette import COLOURS, SERIES
from penstock_bench.report.plots import SETTINGS, WIDTH_INCHES, colour, lined
from penstock_bench.suites.gather.gathered import figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from penstock_bench.report.lines import Passes
    from penstock_bench.results.results import Results

BARS_MAX = 40
"""Of one drawing: what somebody may look at."""

_BAR_INCHES = 0.3


class Bar(NamedTuple):
    """One of them.

    Attributes:
        label: What it stands for.
        values: Of each round; none where there is no result.
        is_ours: Whether it is to be seen first.
    """

    label: str
    values: Sequence[float]
    is_ours: bool = True


def bars(
    made: Sequence[Bar], name: str, *, label: str, unit: str, most: float | None = None
) -> Markup:
    """A bar of each, in their order.

    Args:
        made: What is drawn.
        name: What no other drawing of the page is called.
        label: What it shows, for who cannot see it.
        unit: Of the axis.
        most: What is possible, as a dashed line.
    """
    medians = np.array([np.median(bar.values) if bar.values else 0.0 for bar in made])
    ends = np.array([(min(bar.values), max(bar.values)) if bar.values else (0, 0) for bar in made])
    with mpl.rc_context(SETTINGS):
        drawing = Figure(
            figsize=(WIDTH_INCHES, 0.75 + _BAR_INCHES * len(made)), layout="constrained"
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
                figure(float(medians[place])) if bar.values else "no result",
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
                color=colour(line),
                yerr=np.abs(ends.T - means),
                error_kw={"ecolor": COLOURS["ink"].light, "elinewidth": 0.8},
            )
        axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
        axes.set(xlabel="pass", ylabel="GB/s")
        axes.grid(visible=False, axis="x")

    title = passes.panel.title
    return lined(passes.panel, list(drawn), draw, name, f"GB/s of each pass, {title}")
