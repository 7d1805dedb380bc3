"""The table as a picture: rates of saves and loads, with the range over the rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

from penstock_bench.suites.save_load.runner import FIO

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from penstock_bench.suites.save_load.results import Results

_OURS, _OTHERS, _DEVICE = "#1f6feb", "#9aa4b2", "#d1495b"


def draw(results: Results, path: Path) -> None:
    """Writes a PNG; a state without a single number is left out."""
    drawn = [
        state
        for state in results.states
        if not state.startswith("scaling") and any(s.error is None for s in results.samples)
    ]
    if not drawn:
        return
    rows_max = max(len(results.rows(state)) for state in drawn)
    figure, axes = plt.subplots(
        len(drawn),
        2,
        figsize=(12, 1.2 + (0.34 * rows_max + 0.8) * len(drawn)),
        squeeze=False,
        layout="constrained",
    )
    for state, pair in zip(drawn, axes, strict=True):
        for operation, axis in zip(("save", "load"), pair, strict=True):
            _panel(results, state, operation, axis)
    machine, disk = results.machine, results.disk
    figure.suptitle(
        f"Interleaved rounds: {results.settings['rounds']}, median and range; "
        f"{machine['cores']} cores, {disk['file_system']}, Linux {machine['kernel']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(results: Results, state: str, operation: str, axis: Axes) -> None:
    found = {
        row: value
        for row in results.rows(state)
        if row != FIO
        and (value := results.spread(state, row, operation, lambda one: one.gb_per_second))
    }
    rows = sorted(found, key=lambda row: found[row].median)
    medians = [found[row].median for row in rows]
    below = [found[row].median - found[row].least for row in rows]
    above = [found[row].most - found[row].median for row in rows]
    colours = [_OURS if row.startswith("penstock") else _OTHERS for row in rows]
    bars = axis.barh(rows, medians, color=colours, xerr=(below, above), ecolor="#333333", capsize=2)
    # Bars that differ by orders of magnitude are told apart by their numbers.
    axis.bar_label(bars, fmt=" %.3g", fontsize=7, padding=8)
    axis.margins(x=0.18)
    device = results.spread(state, FIO, operation, lambda one: one.gb_per_second)
    if device:
        axis.axvline(device.median, color=_DEVICE, linestyle="--", linewidth=1.2)
        axis.axvspan(device.least, device.most, color=_DEVICE, alpha=0.12, linewidth=0)
        axis.text(
            device.median,
            0.02,
            f" fio {device.median:.2f}",
            color=_DEVICE,
            fontsize=7,
            transform=axis.get_xaxis_transform(),
        )
    what = "durable save" if operation == "save" else "cold load"
    axis.set_title(f"{state} ({results.states[state]['bytes'] / 1e9:.2f} GB): {what}", fontsize=9)
    axis.set_xlabel("GB/s", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
