"""The tables and the plot of what training loses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock_bench.suites.save_load.report import MIB, describe, with_range
from penstock_bench.suites.training.results import lost_seconds
from penstock_bench.suites.training.savers import NOTHING, SAVERS

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import RenderableType

    from penstock_bench.suites.training.results import Results, Round, Sample

_OURS, _OTHERS = "#1f6feb", "#9aa4b2"

_COLUMNS: tuple[tuple[str, Callable[[Sample, Round], float | None], str], ...] = (
    ("call s", lambda one, _: one.call_seconds, ".3g"),
    ("stall s", lambda one, _: one.stall_seconds, ".3g"),
    ("stall s,\nfirst save", lambda one, _: one.first_stall_seconds, ".3g"),
    ("lost s\nper save", lost_seconds, ".3g"),
    ("durable\nafter s", lambda one, _: one.durable_seconds, ".3g"),
    ("extra\nMiB", lambda one, _: one.extra_bytes / MIB, ".0f"),
    ("stall /\ncopy", lambda one, _: one.stall_seconds / one.copy_seconds, ".2f"),
)


def render(results: Results) -> RenderableType:
    """Everything that a run shows."""
    settings = results.settings
    lines = [
        *describe(results.machine, results.disk),
        f"{settings['rounds']} interleaved rounds of {settings['saves']} saves each, "
        f"{settings['every']} steps after a save; median [least, most]",
    ]
    nothing = results.spread(NOTHING, lambda one, _: one.timing.seconds / one.steps)
    copy = [results.spread(saver, lambda one, _: one.copy_seconds) for saver in results.savers]
    sizes = {one.state_bytes for one in results.samples if one.error is None}
    if sizes:
        lines.append(f"state {max(sizes) / 1e9:.2f} GB")
    if nothing:
        lines.append(f"a step without saves {with_range(nothing, '.3g')} s")
    found = [one.median for one in copy if one]
    if found:
        lines.append(f"a plain copy of the state {min(found):.3g} to {max(found):.3g} s")
    return Group(
        Text("\n".join(lines)), Text(), _table(results), *_notes(results), _ratios(results)
    )


def _table(results: Results) -> Table:
    table = Table(title="What training loses", title_justify="left", title_style="bold")
    table.add_column("")
    for heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for saver in results.savers:
        if saver == NOTHING:
            continue
        cells = []
        for _, value, form in _COLUMNS:
            found = results.spread(saver, value)
            cells.append(with_range(found, form) if found else "-")
        style = "bold" if saver.startswith("penstock") else ""
        table.add_row(saver, *cells, style=style)
    return table


def _notes(results: Results) -> list[RenderableType]:
    notes: list[RenderableType] = [
        Text(f"  {saver} FAILED: {error}", style="bold red")
        for saver in results.savers
        for error in results.errors(saver)
    ]
    for saver in results.savers:
        entry = SAVERS[saver]
        version = results.machine["versions"].get(entry.package)
        notes.append(Text(f"  {saver} ({entry.package} {version}): {entry.note}"))
    if len({one.loss for one in results.samples if one.error is None}) > 1:
        notes.append(Text("  THE RUNS DID NOT TRAIN THE SAME: losses differ", style="bold red"))
    return notes


def _ratios(results: Results) -> Table:
    table = Table(
        "ratio",
        title="Ratios",
        title_justify="left",
        title_style="bold",
        caption="Within a round, then their median. The best DCP: for each figure, of each round.",
    )
    table.add_column("median [least, most]", justify="right")
    for title, found in results.ratios():
        table.add_row(title, with_range(found, ".3g") if found else "not measured")
    return table


def draw(results: Results, path: Path) -> None:
    """Plots what a save costs training, and how long its call holds it up."""
    panels: tuple[tuple[str, Callable[[Sample, Round], float | None]], ...] = (
        ("stall: the call, and waits for it", lambda one, _: one.stall_seconds),
        ("training time lost per save", lost_seconds),
    )
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for (title, value), axis in zip(panels, axes, strict=True):
        found = {saver: results.spread(saver, value) for saver in results.savers}
        rows = {saver: one for saver, one in found.items() if one and saver != NOTHING}
        order = sorted(rows, key=lambda saver: -rows[saver].median)
        medians = [rows[saver].median for saver in order]
        below = [rows[saver].median - rows[saver].least for saver in order]
        above = [rows[saver].most - rows[saver].median for saver in order]
        colours = [_OURS if saver.startswith("penstock") else _OTHERS for saver in order]
        bars = axis.barh(order, medians, color=colours, xerr=(below, above), capsize=2)
        axis.bar_label(bars, fmt=" %.3g", fontsize=7, padding=8)
        axis.margins(x=0.18)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("seconds", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
