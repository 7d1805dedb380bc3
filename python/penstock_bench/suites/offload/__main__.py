"""The command behind `make bench SUITE=offload`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from penstock.common.machine.quiesce import settle
from penstock_bench.harness import fio, machine, memory, process, progress
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.options import (
    QUICK_ROUNDS,
    ROOT,
    common,
    names_option,
    output_directory,
    show,
)
from penstock_bench.harness.running import rotated
from penstock_bench.suites.offload import report, worker
from penstock_bench.suites.offload.results import (
    DEEPSPEED,
    DEEPSPEED_PLAIN,
    FIO,
    LATENCY,
    PENSTOCK,
    PENSTOCK_PLAIN,
    PENSTOCK_REUSED,
    ROWS,
    Results,
    Sample,
)
from penstock_bench.suites.offload.worker import READ, WRITE, Setting, Task

if TYPE_CHECKING:
    from pathlib import Path

_MIB = 1 << 20
_SIZE_MIB, _QUICK_SIZE_MIB = 1024, 128
_ROUNDS = 7
_BLOCKS = (_MIB, 8 * _MIB)
_DEPTH, _THREADS = 32, 2
_LATENCY_SECONDS = 1

process.preload("penstock_bench.suites.offload.worker")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@names_option("--only", "names", tuple(ROWS), "Who moves tensors, separated by commas")
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
    """Move one tensor from and to one file, whole, without the page cache."""
    # Without GPUs; who has some takes them out of the comparison.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    size_bytes = (_QUICK_SIZE_MIB if quick else _SIZE_MIB) * _MIB
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    results = Results(
        machine=machine.describe(ROOT),
        disk=machine.disk(directory),
        settings={
            "command": sys.argv[1:],
            "rounds": rounds or (QUICK_ROUNDS if quick else _ROUNDS),
            "size_bytes": size_bytes,
            "is_quick": quick,
        },
    )
    with workplace(directory, 2 * size_bytes) as place:
        _Runner(results, names, place, timeout).run()
    where = output_directory(output)
    results.write(where / "offload.json")
    show(report.render(results), where, "offload")


class _Runner:
    """Measures everything, with a progress bar on standard error."""

    def __init__(
        self, results: Results, names: tuple[str, ...], place: Path, timeout_seconds: float
    ) -> None:
        self._results = results
        self._names = names
        self._place = place
        self._timeout_seconds = timeout_seconds
        # What is read stays as it is; all write over the same other one, so that where its parts
        # lie makes no difference between them.
        self._file, self._written = place / "tensor", place / "written"
        self._best: dict[tuple[str, int], Setting] = {}

    def run(self) -> None:
        """The file, DeepSpeed's sweep, then rounds."""
        rounds: int = self._results.settings["rounds"]
        blocks = [(operation, block) for block in _BLOCKS for operation in (READ, WRITE)]
        turns: list[tuple[str, str, int]] = [
            (name, operation, block)
            for operation, block in blocks
            for name in (PENSTOCK, DEEPSPEED, PENSTOCK_REUSED, FIO)
        ]
        turns += [
            (name, operation, 0)
            for operation in (READ, WRITE)
            for name in (PENSTOCK_PLAIN, DEEPSPEED_PLAIN)
        ]
        turns += [(name, LATENCY, 0) for name in (PENSTOCK, FIO)]
        turns = [turn for turn in turns if turn[0] in self._names]
        with progress.shown(len(blocks) + rounds * len(turns), "touching memory") as tell:
            memory.warm(2 * self._results.settings["size_bytes"])
            for operation in (READ, WRITE):
                self._process(worker.fill, self._task(PENSTOCK, operation))
            for operation, block in blocks:
                tell(f"DeepSpeed's sweep: {_named(operation, block)}", 0)
                if DEEPSPEED in self._names:
                    self._sweep(operation, block)
                tell("", 1)
            for index in range(rounds):
                for name, operation, block in rotated(turns, index):
                    tell(f"round {index + 1}: {name}, {_named(operation, block)}", 0)
                    self._turn(name, operation, block, index)
                    tell("", 1)

    def _sweep(self, operation: str, block: int) -> None:
        settings = worker.grid(block)
        found = self._process(
            worker.sweep, replace(self._task(DEEPSPEED, operation), settings=settings)
        )
        named = _named(operation, block)
        if "error" in found:
            self._results.samples.append(Sample(DEEPSPEED, 0, named, error=found["error"]))
            return
        seconds = dict(zip(settings, found["seconds"], strict=True))
        best = min(seconds, key=lambda one: seconds[one])
        self._best[operation, block] = best
        self._results.best[named] = str(best)
        self._results.sweep += [(named, str(one), spent) for one, spent in seconds.items()]

    def _turn(self, name: str, operation: str, block: int, index: int) -> None:
        size_bytes = self._results.settings["size_bytes"]
        sample = Sample(name, index, _named(operation, block), nbytes=worker.TIMES * size_bytes)
        settle(self._place)
        if name == FIO:
            found = self._fio(operation, block)
        elif operation == LATENCY:
            found = self._process(worker.latency, self._task(name, READ))
        else:
            task = self._task(name, operation)
            if block:
                ours = Setting(block, _DEPTH, _THREADS)
                setting = self._best.get((operation, block)) if name == DEEPSPEED else ours
                if setting is None:
                    return
                task = replace(task, settings=(setting,))
            if name == PENSTOCK_REUSED:
                task = replace(task, memory_bytes=min(size_bytes, _DEPTH * _THREADS * block))
            found = self._process(worker.run, task)
        sample.error = found.get("error")
        sample.seconds = found.get("seconds", 0.0)
        sample.cpu_seconds = found.get("cpu_seconds", 0.0)
        self._results.samples.append(sample)

    def _task(self, name: str, operation: str) -> Task:
        size_bytes = self._results.settings["size_bytes"]
        return Task(
            library="deepspeed" if name in (DEEPSPEED, DEEPSPEED_PLAIN) else "penstock",
            operation=operation,
            path=str(self._written if operation == WRITE else self._file),
            nbytes=size_bytes,
            memory_bytes=size_bytes,
            is_pinned=name not in (PENSTOCK_PLAIN, DEEPSPEED_PLAIN),
        )

    def _process(self, function: Any, task: Task) -> dict[str, Any]:
        (found,) = process.run(function, [task], self._place, self._timeout_seconds)
        return found

    def _fio(self, operation: str, block: int) -> dict[str, Any]:
        """The same by fio: each of its threads its part of the file, or a page at a time."""
        size_bytes = self._results.settings["size_bytes"]
        path = self._written if operation == WRITE else self._file
        command = ["fio", "--name=bench", f"--filename={path}", "--direct=1"]
        command += ["--ioengine=io_uring", "--iomem_align=2m", "--output-format=json"]
        command += ["--overwrite=1", "--fallocate=none", "--group_reporting"]
        if operation == LATENCY:
            command += ["--rw=randread", "--bs=4k", "--iodepth=1", f"--size={size_bytes}"]
            command += ["--time_based", f"--runtime={_LATENCY_SECONDS}", "--lat_percentiles=1"]
        else:
            share = size_bytes // _THREADS
            command += [f"--rw={operation}", f"--bs={block}", f"--iodepth={_DEPTH}", "--thread"]
            command += [f"--loops={worker.TIMES}"]
            command += [f"--numjobs={_THREADS}", f"--size={share}", f"--offset_increment={share}"]
        try:
            told = fio.job(command)
        except (FioError, OSError) as error:
            return {"error": str(error)}
        side = told[WRITE if operation == WRITE else READ]
        if operation == LATENCY:
            return {"seconds": side["lat_ns"]["percentile"]["50.000000"] / 1e9}
        return {"seconds": side["runtime"] / 1000, "cpu_seconds": fio.cpu_seconds(told)}


def _named(operation: str, block: int) -> str:
    return f"{operation} {block // _MIB}M" if block else operation


if __name__ == "__main__":
    main()
