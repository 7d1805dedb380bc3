"""The command behind `make bench SUITE=ranks`."""

from __future__ import annotations

import shutil
import socket
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
from penstock_bench.suites.ranks import planning, report, worker
from penstock_bench.suites.ranks.results import ENTRIES, LOAD, LOAD_ALONE, SAVE, Results, Sample
from penstock_bench.workloads.states import GIB

if TYPE_CHECKING:
    from pathlib import Path

_SIZE_GIB, _QUICK_SIZE_GIB = 2.0, 1 / 16
_TENSORS, _QUICK_TENSORS = 10_000, 1000
_FREE_TIMES_STATE = 1.2

process.preload("penstock_bench.suites.ranks.worker", "penstock_bench.suites.ranks.planning")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@names_option(
    "--only", "names", tuple(ENTRIES), "Who saves, separated by commas", "all; '': only plans"
)
@names_option("--cases", "cases", tuple(planning.CASES), "What to plan", "all; '': nothing")
@click.option("--ranks", type=click.IntRange(min=2, max=64), default=4, show_default=True)
@click.option("--size-gib", type=click.FloatRange(min=0.001), help="Of the state in all. [2]")
@common
@click.option(
    "--timeout", default=600.0, show_default=True, help="Seconds for one save or load, at most."
)
def main(
    names: tuple[str, ...],
    cases: tuple[str, ...],
    ranks: int,
    size_gib: float | None,
    rounds: int | None,
    quick: bool,
    directory: Path,
    output: Path | None,
    timeout: float,
) -> None:
    """Save and load with several ranks, and plan for thousands."""
    size_bytes = int((size_gib or (_QUICK_SIZE_GIB if quick else _SIZE_GIB)) * GIB)
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    results = Results(
        machine=machine.describe(ROOT),
        disk=machine.disk(directory),
        settings={
            "command": sys.argv[1:],
            "rounds": rounds or (QUICK_ROUNDS if quick else ROUNDS),
            "ranks": ranks,
            "size_bytes": size_bytes,
            "tensors": _QUICK_TENSORS if quick else _TENSORS,
            "is_quick": quick,
        },
    )
    with workplace(directory, _FREE_TIMES_STATE * size_bytes) as place:
        _Runner(results, names, cases, place, timeout).run()
    where = output_directory(output)
    results.write(where / "ranks.json")
    report.draw(results, where / "ranks.png")
    report.draw(results, where / "ranks.svg")
    show(report.render(results), where, "ranks")


class _Runner:
    """Measures everything, with a progress bar on standard error."""

    def __init__(
        self,
        results: Results,
        names: tuple[str, ...],
        cases: tuple[str, ...],
        place: Path,
        timeout_seconds: float,
    ) -> None:
        self._results = results
        self._names = names
        self._cases = cases
        self._place = place
        self._timeout_seconds = timeout_seconds
        self._given_up: dict[tuple[str, str], str] = {}
        self._worlds = planning.WORLDS[::2] if results.settings["is_quick"] else planning.WORLDS

    def run(self) -> None:
        """Rounds first, then plans."""
        rounds: int = self._results.settings["rounds"]
        total = rounds * len(self._names) + len(self._cases) * len(self._worlds)
        with progress.shown(total, "touching memory") as tell:
            memory.warm(self._results.settings["size_bytes"])
            for index in range(rounds):
                for name in rotated(self._names, index):
                    tell(f"round {index + 1}: {name}", 0)
                    self._turn(name, index)
                    tell("", 1)
            for case in self._cases:
                for ranks in self._worlds:
                    tell(f"planning for {ranks}: {case}", 0)
                    self._plan(case, ranks)
                    tell("", 1)

    def _turn(self, name: str, index: int) -> None:
        """Saves, and loads what was saved."""
        ranks = 1 if ENTRIES[name].is_alone else self._results.settings["ranks"]
        if self._operate(name, index, SAVE, ranks):
            if ranks > 1:
                self._operate(name, index, LOAD, ranks)
            self._operate(name, index, LOAD_ALONE, 1)
        shutil.rmtree(self._place / "checkpoint", ignore_errors=True)

    def _operate(self, name: str, index: int, operation: str, ranks: int) -> bool:
        """One operation; tells whether it succeeded."""
        entry, settings = ENTRIES[name], self._results.settings
        port = _free_port()
        tasks = [
            worker.Task(
                library=entry.library,
                threads=entry.threads,
                operation="save" if operation == SAVE else "load",
                rank=rank,
                ranks=ranks,
                size_bytes=settings["size_bytes"],
                directory=str(self._place / "checkpoint"),
                port=port,
                is_checked=index == 0,
            )
            for rank in range(ranks)
        ]
        sample = Sample(name, index, operation, error=self._given_up.get((name, operation)))
        if sample.error is None:
            found = process.run(worker.run, tasks, self._place, self._timeout_seconds)
            errors = [one["error"] for one in found if "error" in one]
            if errors:
                sample.error = self._given_up[name, operation] = errors[0]
            else:
                sample.seconds = found[0]["seconds"]
                sample.state_bytes = found[0]["state_bytes"]
        self._results.samples.append(sample)
        for path in self._place.glob("checkpoint-warm-up-*"):
            shutil.rmtree(path)
        return sample.error is None

    def _plan(self, case: str, ranks: int) -> None:
        task = planning.Task(case, ranks, self._results.settings["tensors"], str(self._place))
        (found,) = process.run(planning.run, [task], self._place, self._timeout_seconds)
        self._results.plans.append({"case": case, "ranks": ranks, **found})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
