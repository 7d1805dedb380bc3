"""The plots of suites: panels of bars with the range of the rounds."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from penstock_bench.results.spread import Spread

_OURS, _OTHERS, _BOUND = "#1f6feb", "#9aa4b2", "#d1495b"


@contextmanager
def figure(
    path: Path,
    panels: int,
    title: str = "",
    *,
    columns: int = 2,
    height: float = 4.0,
) -> Iterator[list[Axes]]:
    """Writes the panels that the block draws into an image, 12 inches wide."""
    drawn, axes = plt.subplots(
        -(-panels // columns), columns, figsize=(12, height), squeeze=False, layout="constrained"
    )
    yield list(axes.flat)
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    drawn.suptitle(title, fontsize=10)
    drawn.savefig(path, dpi=130)
    plt.close(drawn)


def medians(found: Sequence[Spread]) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Medians, and how far the range goes below and above each."""
    below = [one.median - one.least for one in found]
    above = [one.most - one.median for one in found]
    return [one.median for one in found], (below, above)


def bars(
    axis: Axes, found: dict[str, Spread], title: str, unit: str, *, is_rate: bool = True
) -> None:
    """Draws a bar for each row, the best one on top; those of Penstock stand out."""
    rows = sorted(found, key=lambda row: found[row].median, reverse=not is_rate)
    middle, errors = medians([found[row] for row in rows])
    colours = [_OURS if row.startswith("penstock") else _OTHERS for row in rows]
    drawn = axis.barh(rows, middle, color=colours, xerr=errors, ecolor="#333333", capsize=2)
    # Bars that differ by orders of magnitude are told apart by their numbers.
    axis.bar_label(drawn, fmt=" %.3g", fontsize=7, padding=8)
    axis.margins(x=0.18)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(unit, fontsize=8)


def bound(axis: Axes, found: Spread, label: str) -> None:
    """Draws a vertical line at a median, with its range shaded."""
    axis.axvline(found.median, color=_BOUND, linestyle="--", linewidth=1.2)
    axis.axvspan(found.least, found.most, color=_BOUND, alpha=0.12, linewidth=0)
    axis.text(
        found.median,
        0.02,
        f" {label} {found.median:.2f}",
        color=_BOUND,
        fontsize=7,
        transform=axis.get_xaxis_transform(),
    )
