"""The tables and the plots of what ranks save, load and plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock_bench.suites.ranks.planning import CASES
from penstock_bench.suites.ranks.results import ENTRIES, LOAD, LOAD_ALONE, SAVE
from penstock_bench.suites.save_load.report import describe, with_range

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from penstock_bench.suites.ranks.results import Results


def render(results: Results) -> RenderableType:
    """Everything that a run shows."""
    parts: list[RenderableType] = [Text("\n".join(describe(results.machine, results.disk)))]
    if results.samples:
        parts += [Text(), _rates(results), *_notes(results), _ratios(results)]
    if results.plans:
        parts += [Text(), _plans(results)]
        parts += [Text(f"  {case}: {text}") for case, text in CASES.items()]
    return Group(*parts)


def _rates(results: Results) -> Table:
    settings = results.settings
    ranks = settings["ranks"]
    sizes = {one.state_bytes for one in results.samples if one.error is None}
    size = f"{max(sizes) / 1e9:.2f} GB in all, " if sizes else ""
    table = Table(
        title=f"{ranks} ranks, {size}{settings['rounds']} interleaved rounds; GB/s of all ranks "
        "together, median [least, most]",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("")
    for heading in ("save", f"load by {ranks}", "load by 1"):
        table.add_column(heading, justify="right")
    for row in results.rows:
        found = [results.spread(row, operation) for operation in (SAVE, LOAD, LOAD_ALONE)]
        table.add_row(row, *(with_range(one, ".3g") if one else "-" for one in found))
    return table


def _notes(results: Results) -> list[RenderableType]:
    notes: list[RenderableType] = [
        Text(f"  FAILED: {error}", style="bold red") for error in results.errors()
    ]
    return [*notes, *(Text(f"  {row}: {ENTRIES[row].note}") for row in results.rows)]


def _ratios(results: Results) -> Table:
    table = Table("ratio of rates", caption="Within a round, then their median.")
    table.add_column("median [least, most]", justify="right")
    for title, found in results.ratios():
        table.add_row(title, with_range(found, ".3g") if found else "not measured")
    return table


def _plans(results: Results) -> Table:
    tensors = results.settings["tensors"]
    table = Table(
        title=f"What rank 0 plans, of {tensors:,} tensors; no communication",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("case")
    for heading in (
        "ranks",
        "seconds",
        "of these\nspread",
        "of these\nnative",
        "first\ntime",
        "pieces\nto write",
        "a vote,\nbytes",
        "all votes,\nbytes",
    ):
        table.add_column(heading, justify="right")
    for plan in results.plans:
        if plan.get("error"):
            table.add_row(plan["case"], str(plan["ranks"]), f"FAILED: {plan['error']}")
            continue
        table.add_row(
            plan["case"],
            str(plan["ranks"]),
            f"{plan['spread_seconds'] + plan['job_seconds']:.3f}",
            f"{plan['spread_seconds']:.3f}",
            f"{plan['job_seconds']:.3f}",
            f"{plan['first_seconds']:.3f}",
            f"{plan['pieces']:,}",
            f"{plan['vote_bytes']:,}",
            f"{plan['gather_bytes']:,}",
        )
    return table


def draw(results: Results, path: Path) -> None:
    """Plots rates, and the time to plan by the number of ranks."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    operations = (SAVE, LOAD, LOAD_ALONE)
    width = 0.8 / len(operations)
    for place, operation in enumerate(operations):
        found = [(index, results.spread(row, operation)) for index, row in enumerate(results.rows)]
        known = [(index, one) for index, one in found if one]
        medians = [one.median for _, one in known]
        errors = (
            [one.median - one.least for _, one in known],
            [one.most - one.median for _, one in known],
        )
        at = [index + (place - 1) * width for index, _ in known]
        left.bar(at, medians, width, yerr=errors, capsize=2, label=operation)
    left.set_xticks(range(len(results.rows)), results.rows)
    left.set_ylabel("GB/s, all ranks together", fontsize=8)
    for case in CASES:
        plans = [one for one in results.plans if one["case"] == case and not one.get("error")]
        right.plot(
            [one["ranks"] for one in plans],
            [one["spread_seconds"] + one["job_seconds"] for one in plans],
            marker="o",
            label=case,
        )
    right.set_xscale("log", base=2)
    right.set_ylim(bottom=0)
    right.set_xlabel("ranks", fontsize=8)
    right.set_ylabel("seconds to plan, one rank", fontsize=8)
    for axis in (left, right):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
