"""The command behind `make bench SUITE=training`: what a training run loses by saving."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from penstock_bench.harness import machine, memory, plots, tables
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample, Samples, quotient
from penstock_bench.results.spread import Spread, plain, spread
from penstock_bench.suites.training import loop
from penstock_bench.suites.training.loop import Task, Timing
from penstock_bench.suites.training.savers import ASYNC, DCP, LAZY, NOTHING, SAVERS, SYNC
from penstock_bench.workloads.states import GIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Group

_SIZE_GIB, _QUICK_SIZE_GIB = 2.0, 1 / 16
_WIDTH, _QUICK_WIDTH = 2048, 512
_FREE_TIMES_STATE = 1.1
"""Free space for each byte of tensors: files hold more than these."""


@dataclass
class Training(Sample):
    """One training run.

    Attributes:
        copy_seconds: A plain copy of the state in memory, in the same process.
        extra_bytes: Peak of memory beyond that of training before the first save.
        first: The first save, which finds memory cold, and the steps after it.
        timing: The saves that count.
        steps: Steps among those.
        loss: The loss of the last step, to the last bit.
    """

    copy_seconds: float = 0.0
    extra_bytes: int = 0
    first: Timing = field(default_factory=Timing)
    timing: Timing = field(default_factory=Timing)
    steps: int = 0
    loss: str = ""

    @property
    def call_seconds(self) -> float:
        """Time of the call, the median of the saves."""
        return statistics.median(self.timing.call_seconds)

    @property
    def stall_seconds(self) -> float:
        """Time of the call, and of the waits of later steps for the save."""
        pairs = zip(self.timing.call_seconds, self.timing.wait_seconds, strict=True)
        return statistics.median(call + wait for call, wait in pairs)

    @property
    def first_stall_seconds(self) -> float:
        """The stall of the first save."""
        return self.first.call_seconds[0] + self.first.wait_seconds[0]

    @property
    def durable_seconds(self) -> float:
        """From the call until the checkpoint is durable."""
        return statistics.median(self.timing.durable_seconds)


FIGURES = {
    "call_seconds": ("call s", ".3g"),
    "stall_seconds": ("stall s", ".3g"),
    "first_stall_seconds": ("stall s,\nfirst save", ".3g"),
    "lost_seconds": ("lost s\nper save", ".3g"),
    "durable_seconds": ("durable\nafter s", ".3g"),
    "extra_bytes": ("extra\nMiB", ".0f"),
    "copy_seconds": ("stall /\ncopy", ".2f"),
}


@suite(
    "training",
    SAVERS,
    "Ways to save",
    preload=["penstock_bench.suites.training.loop"],
    timeout_seconds=900.0,
)
@click.option("--size-gib", type=click.FloatRange(min=0.001), help="Of the state. [2]")
@click.option(
    "--saves",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Saves of a run that count; one more comes before them.",
)
@click.option(
    "--every", type=click.IntRange(min=1), default=6, show_default=True, help="Steps after each."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Samples of a step, which decide how long it computes.",
)
def main(run: Run, size_gib: float | None, **shape: int) -> Report:
    """Train and save, with Penstock and with others: what does training lose?"""
    size_bytes = int((size_gib or (_QUICK_SIZE_GIB if run.is_quick else _SIZE_GIB)) * GIB)
    # All others are compared with the run without saves.
    names = tuple(dict.fromkeys((NOTHING, *run.names)))
    with run.at_work(_FREE_TIMES_STATE * size_bytes * (shape["saves"] + 1), **shape) as place:
        task = Task(
            saver=NOTHING,
            size_bytes=size_bytes,
            width=_QUICK_WIDTH if run.is_quick else _WIDTH,
            directory=str(place / "steps"),
            **shape,
        )
        run.say("touching memory")
        memory.warm(size_bytes)
        for index, name in run.in_rounds(names):
            found: dict[str, Any]
            if machine.package_version(SAVERS[name].package) is None:
                found = {"error": f"{SAVERS[name].package} is not installed"}
            else:
                found = run.child(loop.run, dataclasses.replace(task, saver=name), name)
                shutil.rmtree(task.directory, ignore_errors=True)
            found |= {one: Timing(**found[one]) for one in ("first", "timing") if one in found}
            run.results.add(Training(name, index), found)
    results = run.results
    summary = {
        row: {name: plain(spread(figure(results, row, name).values())) for name in FIGURES}
        for row in results.rows
    }
    found_ratios = {title: plain(found) for title, found in ratios(results)}
    return Report(
        _tables(results),
        {"summary": summary, "ratios": found_ratios},
        functools.partial(_draw, results),
    )


def figure(results: Samples[Training], row: str, name: str) -> dict[int, float]:
    """A figure of a saver by round."""
    return lost_seconds(results, row) if name == "lost_seconds" else results.values(row, name)


def lost_seconds(results: Samples[Training], row: str) -> dict[int, float]:
    """Training time lost to one save, by round: calls, waits, and work in the background."""
    idle = results.values(NOTHING, lambda one: one.timing.seconds)
    return {
        one.round_index: (one.timing.seconds - idle[one.round_index]) / len(one.timing.call_seconds)
        for one in results.good(row)
        if one.round_index in idle
    }


def ratios(results: Samples[Training]) -> list[tuple[str, Spread | None]]:
    """The ratios that matter, each within a round, then over the rounds."""

    def best_dcp(name: str) -> dict[int, float]:
        """The least that any setting of DCP has in a round."""
        every = [figure(results, row, name) for row in DCP]
        rounds = {index for one in every for index in one}
        return {index: min(one[index] for one in every if index in one) for index in rounds}

    def over(above: dict[int, float], below: dict[int, float]) -> Spread | None:
        # The lost time of a round may be zero or negative: it has no ratio then.
        return quotient(
            *({i: one for i, one in some.items() if one > 0} for some in (above, below))
        )

    def of(row: str, name: str) -> dict[int, float]:
        return figure(results, row, name)

    stall, lost, durable, copy = "stall_seconds", "lost_seconds", "durable_seconds", "copy_seconds"
    return [
        ("stall of async / a plain copy of the state", over(of(ASYNC, stall), of(ASYNC, copy))),
        ("stall of lazy / a synchronous save", over(of(LAZY, stall), of(SYNC, stall))),
        ("stall of the best DCP / of async", over(best_dcp(stall), of(ASYNC, stall))),
        ("stall of the best DCP / of lazy", over(best_dcp(stall), of(LAZY, stall))),
        ("lost with the best DCP / with async", over(best_dcp(lost), of(ASYNC, lost))),
        ("lost with the best DCP / with lazy", over(best_dcp(lost), of(LAZY, lost))),
        ("until durable, the best DCP / async", over(best_dcp(durable), of(ASYNC, durable))),
    ]


def _tables(results: Samples[Training]) -> Group:
    settings = results.settings
    lines = [
        f"{settings['rounds']} interleaved rounds of {settings['saves']} saves each, "
        f"{settings['every']} steps after a save; median [least, most]",
    ]
    good = [one for one in results.samples if one.error is None]
    if good:
        lines.append(f"state {max(one.nbytes for one in good) / 1e9:.2f} GB")
    if idle := results.spread(NOTHING, lambda one: one.timing.seconds / one.steps):
        lines.append(f"a step without saves {idle.with_range('.3g')} s")
    if copies := [
        one.median for row in results.rows if (one := results.spread(row, "copy_seconds"))
    ]:
        lines.append(f"a plain copy of the state {min(copies):.3g} to {max(copies):.3g} s")
    rows = {row: _cells(results, row) for row in results.rows if row != NOTHING}
    headings = [heading for heading, _ in FIGURES.values()]
    versions = results.machine["versions"]
    words = {
        f"{row} ({SAVERS[row].package} {versions.get(SAVERS[row].package)})": SAVERS[row].note
        for row in results.rows
    }
    failed = results.errors()
    if len({one.loss for one in good}) > 1:
        failed.append("THE RUNS DID NOT TRAIN THE SAME: losses differ")
    return tables.page(
        results,
        tables.figures("What training loses", headings, rows, bold="penstock"),
        *tables.notes(failed, words),
        tables.ratios(
            ratios(results),
            "ratio",
            title="Ratios",
            caption=f"{tables.WITHIN} The best DCP: for each figure, of each round.",
            missing="not measured",
        ),
        lines=lines,
    )


def _cells(results: Samples[Training], row: str) -> list[str]:
    shown: dict[str, Callable[[Training], float]] = {
        "extra_bytes": lambda one: one.extra_bytes / (1 << 20),
        "copy_seconds": lambda one: one.stall_seconds / one.copy_seconds,
    }
    cells = []
    for name, (_, form) in FIGURES.items():
        found = results.values(row, shown[name]) if name in shown else figure(results, row, name)
        cells.append(tables.cell(spread(found.values()), form))
    return cells


def _draw(results: Samples[Training], path: Path) -> None:
    """Plots what a save costs training, and for how long its call stalls it."""
    panels = {
        "stall: the call, and waits for it": "stall_seconds",
        "training time lost per save": "lost_seconds",
    }
    with plots.figure(path, len(panels)) as axes:
        for (title, name), axis in zip(panels.items(), axes, strict=True):
            every = {row: spread(figure(results, row, name).values()) for row in results.rows}
            found = {row: one for row, one in every.items() if one and row != NOTHING}
            plots.bars(axis, found, title, "seconds", is_rate=False)


if __name__ == "__main__":
    main()
