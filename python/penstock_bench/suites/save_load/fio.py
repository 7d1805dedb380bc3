"""fio: what the device gives to a program that does nothing but I/O."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import fio
from penstock_bench.harness.cases import MIB
from penstock_bench.harness.fio import FioError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# The best of a sweep of single runs is a lucky one; the first few are run again.
_FINALISTS = 3
_FINAL_RUNS = 3


@dataclass(frozen=True)
class Setting:
    """How fio moves bytes, always with O_DIRECT."""

    engine: str
    block_bytes: int
    depth: int
    jobs: int

    def __str__(self) -> str:
        jobs = f", {self.jobs} jobs" if self.jobs > 1 else ""
        return f"{self.engine}, {self.block_bytes // MIB} MiB x {self.depth}{jobs}"


class Run(NamedTuple):
    """A run's figures as fio has them: its time begins after the files were allocated."""

    seconds: float
    cpu_seconds: float
    nbytes: int

    @property
    def gb_per_second(self) -> float:
        """The rate."""
        return self.nbytes / self.seconds / 1e9


def settings(is_quick: bool) -> list[Setting]:
    """The settings that the sweep tries."""
    depths = (4, 16) if is_quick else (4, 16, 32)
    jobs = (1,) if is_quick else (1, 2)
    combined = itertools.product(("io_uring", "libaio"), (MIB, 4 * MIB), depths, jobs)
    return [Setting(*one) for one in combined]


def run(setting: Setting, operation: str, directory: Path, nbytes: int) -> Run:
    """Writes fresh files and syncs them, or reads the files that the last write left."""
    share = nbytes // setting.jobs // setting.block_bytes * setting.block_bytes
    command = fio.command(
        directory=directory,
        filename_format="fio.$jobnum",
        rw="write" if operation == "save" else "read",
        ioengine=setting.engine,
        bs=setting.block_bytes,
        iodepth=setting.depth,
        numjobs=setting.jobs,
        size=share,
        group_reporting=True,
        fallocate="native",
        end_fsync=1,
    )
    told = fio.job(command)
    side = told["write" if operation == "save" else "read"]
    return Run(side["runtime"] / 1000, fio.cpu_seconds(told), side["io_bytes"])


def remove(directory: Path) -> None:
    """Deletes what fio wrote."""
    for path in directory.glob("fio.*"):
        path.unlink()


def sweep(
    directory: Path, nbytes: int, is_quick: bool, progress: Callable[[str], None]
) -> tuple[dict[str, Setting], dict[str, Any]]:
    """Finds the best setting to write and to read with; returns them and what was measured."""
    rates: dict[str, dict[Setting, list[float]]] = {"save": {}, "load": {}}
    failures: dict[str, str] = {}

    def measure(setting: Setting) -> None:
        progress(f"fio: {setting}")
        try:
            for operation, found in rates.items():
                quiesce(directory)
                rate = run(setting, operation, directory, nbytes).gb_per_second
                found.setdefault(setting, []).append(rate)
        except FioError as error:
            failures[str(setting)] = str(error)
        finally:
            remove(directory)

    for setting in settings(is_quick):
        measure(setting)
    if not rates["save"] or not rates["load"]:
        raise FioError("; ".join(dict.fromkeys(failures.values())))
    finalists = {
        setting
        for found in rates.values()
        for setting in sorted(found, key=lambda one: -found[one][0])[:_FINALISTS]
    }
    for setting in itertools.chain.from_iterable([sorted(finalists, key=str)] * _FINAL_RUNS):
        measure(setting)
    best = {
        operation: max(finalists, key=lambda one: float(np.median(found.get(one, [0.0]))))
        for operation, found in rates.items()
    }
    record = {
        "file_bytes": nbytes,
        "best": {operation: str(setting) for operation, setting in best.items()},
        "gb_per_second": {
            operation: [{**asdict(setting), "rates": values} for setting, values in found.items()]
            for operation, found in rates.items()
        },
        "failures": failures,
    }
    return best, record
