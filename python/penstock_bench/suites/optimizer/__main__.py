"""The command behind `make bench SUITE=optimizer`."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import click

from penstock.common.machine.quiesce import settle
from penstock_bench.harness import fio, machine, process, progress
from penstock_bench.harness.fio import FioError
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
from penstock_bench.suites.optimizer import report, worker
from penstock_bench.suites.optimizer.results import (
    COPY,
    FIO_BOTH,
    FIO_READ,
    FIO_WRITE,
    SAVE,
    STEPPERS,
    Results,
    Sample,
)
from penstock_bench.suites.optimizer.worker import Task

if TYPE_CHECKING:
    from pathlib import Path

_LAYERS, _QUICK_LAYERS = 8, 2
_STEPS = 5
_MEMORY_BYTES = 512 << 20
_FREE_TIMES_STATE = 5
_MEASURED = (*STEPPERS, FIO_READ, FIO_WRITE, FIO_BOTH)

process.preload("penstock_bench.suites.optimizer.worker")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@names_option("--only", "names", _MEASURED, "What is measured, separated by commas")
@common
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for one process.")
def main(
    names: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    directory: Path,
    output: Path | None,
    timeout: float,
) -> None:
    """Steps of AdamW with its state on storage."""
    # Without GPUs; who has some takes them out of the comparison.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    layers = _QUICK_LAYERS if quick else _LAYERS
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    state_bytes = layers * worker.WIDTH**2 * worker.STATE_BYTES
    results = Results(
        machine=machine.describe(ROOT),
        disk=machine.disk(directory),
        settings={
            "command": sys.argv[1:],
            "rounds": rounds or (QUICK_ROUNDS if quick else ROUNDS),
            "layers": layers,
            "state_bytes": state_bytes,
            "memory_bytes": _MEMORY_BYTES,
            "steps": _STEPS,
        },
    )
    with workplace(directory, _FREE_TIMES_STATE * state_bytes) as place:
        _Runner(results, names, place, timeout).run()
    where = output_directory(output)
    results.write(where / "optimizer.json")
    show(report.render(results), where, "optimizer")


class _Runner:
    """Measures everything, with a progress bar on standard error."""

    def __init__(
        self, results: Results, names: tuple[str, ...], place: Path, timeout_seconds: float
    ) -> None:
        self._results = results
        self._names = [name for name in _MEASURED if name in names]
        self._place = place
        self._timeout_seconds = timeout_seconds
        self._state_bytes: int = results.settings["state_bytes"]

    def run(self) -> None:
        """The files of fio, then rounds."""
        rounds: int = self._results.settings["rounds"]
        with progress.shown(1 + rounds * len(self._names), "files of fio") as tell:
            if any(name not in STEPPERS for name in self._names):
                self._fio([self._job("a", "write"), self._job("b", "write")])
            tell("", 1)
            for index in range(rounds):
                for name in rotated(self._names, index):
                    tell(f"round {index + 1}: {name}", 0)
                    settle(self._place)
                    if name in STEPPERS:
                        self._steps(name, index)
                    else:
                        self._bound(name, index)
                    tell("", 1)

    def _steps(self, name: str, index: int) -> None:
        directory = self._place / "steps"
        directory.mkdir()
        settings = self._results.settings
        task = Task(
            name, str(directory), settings["layers"], settings["memory_bytes"], settings["steps"]
        )
        try:
            (found,) = process.run(worker.run, [task], self._place, self._timeout_seconds)
        finally:
            shutil.rmtree(directory)
        self._results.samples.append(Sample.of_steps(name, index, found))
        if "save_seconds" in found:
            self._results.save_bytes = found["save_bytes"]
            for row, key in ((SAVE, "save_seconds"), (COPY, "copy_seconds")):
                self._results.samples.append(Sample(row, index, found[key]))

    def _bound(self, name: str, index: int) -> None:
        jobs = {
            FIO_READ: [self._job("a", "read")],
            FIO_WRITE: [self._job("b", "write")],
            FIO_BOTH: [self._job("a", "read"), self._job("b", "write")],
        }[name]
        sample = Sample(name, index)
        try:
            sample.seconds = self._fio(jobs)
        except (FioError, OSError) as error:
            sample.error = str(error)
        self._results.samples.append(sample)

    def _job(self, name: str, operation: str) -> list[str]:
        command = [f"--name={operation}-{name}", f"--filename={self._place / f'fio-{name}'}"]
        command += [f"--rw={operation}", f"--size={self._state_bytes}", "--direct=1"]
        command += ["--bs=1m", "--iodepth=32", "--ioengine=io_uring", "--iomem_align=2m"]
        return command + ["--overwrite=1", "--end_fsync=1"] * (operation == "write")

    def _fio(self, jobs: list[list[str]]) -> float:
        """Seconds until all jobs, which begin at once, have ended."""
        command = ["fio", "--output-format=json", *(part for job in jobs for part in job)]
        return float(max(one["job_runtime"] for one in fio.jobs(command))) / 1000


if __name__ == "__main__":
    main()
