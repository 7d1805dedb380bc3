"""The command behind `make bench SUITE=training`."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from typing import TYPE_CHECKING

import click

from penstock_bench.harness import machine, memory, process, progress
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.options import (
    QUICK_ROUNDS,
    ROOT,
    ROUNDS,
    common,
    names_option,
    output_directory,
    show,
)
from penstock_bench.harness.running import rotated
from penstock_bench.suites.training import report
from penstock_bench.suites.training.loop import Task, run
from penstock_bench.suites.training.results import Results, Sample
from penstock_bench.suites.training.savers import NOTHING, SAVERS
from penstock_bench.workloads.states import GIB

if TYPE_CHECKING:
    from pathlib import Path

_SIZE_GIB, _QUICK_SIZE_GIB = 2.0, 1 / 16
_WIDTH, _QUICK_WIDTH = 2048, 512
# What files take beside the tensors.
_FREE_TIMES_STATE = 1.1

process.preload("penstock_bench.suites.training.loop")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@names_option("--only", "names", tuple(SAVERS), "Ways to save, separated by commas")
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
@common
@click.option("--timeout", default=900.0, show_default=True, help="Seconds for one run, at most.")
def main(
    names: tuple[str, ...],
    size_gib: float | None,
    rounds: int | None,
    saves: int,
    every: int,
    batch: int,
    quick: bool,
    directory: Path,
    output: Path | None,
    timeout: float,
) -> None:
    """Train and save, with Penstock and with others: what does training lose?"""
    size_bytes = int((size_gib or (_QUICK_SIZE_GIB if quick else _SIZE_GIB)) * GIB)
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    # Without it there is nothing to compare with.
    names = tuple(dict.fromkeys((NOTHING, *names)))
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    needed = _FREE_TIMES_STATE * size_bytes * (saves + 1)
    results = Results(
        machine=machine.describe(ROOT),
        disk=machine.disk(directory),
        settings={
            "command": sys.argv[1:],
            "rounds": rounds,
            "saves": saves,
            "every": every,
            "batch": batch,
            "is_quick": quick,
        },
    )
    with workplace(directory, needed) as place:
        task = Task(
            saver=NOTHING,
            size_bytes=size_bytes,
            width=_QUICK_WIDTH if quick else _WIDTH,
            batch=batch,
            saves=saves,
            every=every,
            directory=str(place / "steps"),
        )
        _measure(results, names, task, place, timeout)
    where = output_directory(output)
    results.write(where / "training.json")
    report.draw(results, where / "training.png")
    report.draw(results, where / "training.svg")
    show(report.render(results), where, "training")


def _measure(
    results: Results, names: tuple[str, ...], task: Task, place: Path, timeout_seconds: float
) -> None:
    """Runs everybody once a round, with a progress bar on standard error."""
    rounds: int = results.settings["rounds"]
    given_up: dict[str, str] = {}
    with progress.shown(rounds * len(names), "touching memory") as tell:
        memory.warm(task.size_bytes)
        for index in range(rounds):
            for name in rotated(names, index):
                tell(f"round {index + 1}: {name}", 0)
                fields: dict[str, object] = {"error": given_up.get(name)}
                if machine.package_version(SAVERS[name].package) is None:
                    fields = {"error": f"{SAVERS[name].package} is not installed"}
                elif name not in given_up:
                    (fields,) = process.run(
                        run, [dataclasses.replace(task, saver=name)], place, timeout_seconds
                    )
                    shutil.rmtree(task.directory, ignore_errors=True)
                if fields.get("error"):
                    given_up[name] = str(fields["error"])
                results.samples.append(Sample.of(name, index, fields))
                tell("", 1)


if __name__ == "__main__":
    main()
