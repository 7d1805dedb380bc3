"""The command behind `make bench SUITE=offload`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import fio, memory, tables
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample
from penstock_bench.results.spread import plain
from penstock_bench.suites.offload import worker
from penstock_bench.suites.offload.worker import READ, WRITE, Setting, Task

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from penstock_bench.results.samples import Samples

PENSTOCK, PENSTOCK_PLAIN = "penstock", "penstock-plain"
DEEPSPEED, DEEPSPEED_PLAIN = "deepspeed", "deepspeed-plain"
PENSTOCK_REUSED, FIO = "penstock-reused", "fio"
ROWS = {
    PENSTOCK: "TensorIO, tensors of Buffers, at the block size; else its defaults",
    DEEPSPEED: "async_io, pinned tensors, at the best point of its sweep at the block size",
    PENSTOCK_REUSED: "the same, of no more memory than fio uses, over and over as fio does",
    FIO: "io_uring, O_DIRECT, huge pages, as many bytes in flight as Penstock",
    PENSTOCK_PLAIN: "TensorIO, tensors of PyTorch, all defaults",
    DEEPSPEED_PLAIN: "async_io, tensors of PyTorch, all defaults",
}
LATENCY = "latency"
_RATE, _PROCESSOR = "gb_per_second", "cpu_seconds_per_gb"

_MIB = 1 << 20
_SIZE_BYTES, _QUICK_SIZE_BYTES = 1024 * _MIB, 128 * _MIB
_BLOCKS = (_MIB, 8 * _MIB)
_DEPTH, _THREADS = 32, 2
_LATENCY_SECONDS = 1


@suite(
    "offload",
    ROWS,
    "Who moves tensors",
    preload=["penstock_bench.suites.offload.worker"],
    rounds_usual=7,
)
def main(run: Run) -> Report:
    """Move one tensor from and to one file, whole, without the page cache."""
    # The comparison is on the CPU also where there are GPUs.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    size_bytes = _QUICK_SIZE_BYTES if run.is_quick else _SIZE_BYTES
    with run.at_work(2 * size_bytes, size_bytes=size_bytes):
        _Scenario(run, size_bytes).measure()
    return Report(_tables(run.results), {"gb_per_second": _summary(run.results)})


class _Scenario:
    def __init__(self, run: Run, size_bytes: int) -> None:
        self._run = run
        self._size_bytes = size_bytes
        # One file is read and never changed. Another one is written over by all of them, so that
        # its place on the disk makes no difference between them.
        self._files = {READ: run.place / "tensor", WRITE: run.place / "written"}
        self._best: dict[tuple[str, int], Setting] = {}
        run.results.extra |= {"best": {}, "sweep": []}

    def measure(self) -> None:
        """Writes the files, sweeps DeepSpeed's settings, then measures in rounds."""
        blocks = [(operation, block) for block in _BLOCKS for operation in (READ, WRITE)]
        turns = [
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
        turns = [turn for turn in turns if turn[0] in self._run.names]
        self._run.say("touching memory")
        memory.warm(2 * self._size_bytes)
        for operation in (READ, WRITE):
            self._run.child(worker.fill, self._task(PENSTOCK, operation))
        swept = blocks if DEEPSPEED in self._run.names else []
        for operation, block in self._run.each(swept, lambda one: f"sweep: {_named(*one)}"):
            self._sweep(operation, block)
        for index, turn in self._run.in_rounds(turns, lambda one: f"{one[0]}, {_named(*one[1:])}"):
            self._turn(*turn, index)

    def _sweep(self, operation: str, block: int) -> None:
        """Finds the best setting of DeepSpeed at a block size."""
        settings, named = worker.grid(block), _named(operation, block)
        task = replace(self._task(DEEPSPEED, operation), settings=settings)
        found = self._run.child(worker.sweep, task)
        if "error" in found:
            self._run.results.samples.append(Sample(DEEPSPEED, 0, named, error=found["error"]))
            return
        seconds = dict(zip(settings, found["seconds"], strict=True))
        best = self._best[operation, block] = min(seconds, key=lambda one: seconds[one])
        extra = self._run.results.extra
        extra["best"][named] = str(best)
        extra["sweep"] += [(named, str(one), spent) for one, spent in seconds.items()]

    def _turn(self, name: str, operation: str, block: int, index: int) -> None:
        sample = Sample(name, index, _named(operation, block), worker.TIMES * self._size_bytes)
        quiesce(self._run.place)
        if name == FIO:
            sample.take(self._fio(operation, block))
        elif operation == LATENCY:
            sample.take(self._run.child(worker.latency, self._task(name, READ)))
        else:
            task = self._task(name, operation)
            if block:
                ours = Setting(block, _DEPTH, _THREADS)
                setting = self._best.get((operation, block)) if name == DEEPSPEED else ours
                if setting is None:
                    return
                task = replace(task, settings=(setting,))
            if name == PENSTOCK_REUSED:
                memory_bytes = min(self._size_bytes, _DEPTH * _THREADS * block)
                task = replace(task, memory_bytes=memory_bytes)
            sample.take(self._run.child(worker.run, task))
        self._run.results.samples.append(sample)

    def _task(self, name: str, operation: str) -> Task:
        return Task(
            library="deepspeed" if name in (DEEPSPEED, DEEPSPEED_PLAIN) else "penstock",
            operation=operation,
            path=str(self._files[operation]),
            nbytes=self._size_bytes,
            memory_bytes=self._size_bytes,
            is_pinned=name not in (PENSTOCK_PLAIN, DEEPSPEED_PLAIN),
        )

    def _fio(self, operation: str, block: int) -> dict[str, Any]:
        """The same by fio: each thread moves its part of the file, or reads one page at a time."""
        path = self._files.get(operation, self._files[READ])
        if operation == LATENCY:
            own: dict[str, Any] = {"rw": "randread", "bs": "4k", "iodepth": 1}
            own |= {"size": self._size_bytes, "time_based": True, "runtime": _LATENCY_SECONDS}
            own |= {"lat_percentiles": 1}
        else:
            share = self._size_bytes // _THREADS
            own = {"rw": operation, "bs": block, "iodepth": _DEPTH, "loops": worker.TIMES}
            own |= {"thread": True, "numjobs": _THREADS, "size": share, "offset_increment": share}
        command = fio.command(
            filename=path, overwrite=1, fallocate="none", group_reporting=True, **own
        )
        try:
            told = fio.job(command)
        except FioError as error:
            return {"error": str(error)}
        side = told[WRITE if operation == WRITE else READ]
        if operation == LATENCY:
            return {"seconds": side["lat_ns"]["percentile"]["50.000000"] / 1e9}
        return {"seconds": side["runtime"] / 1000, "cpu_seconds": fio.cpu_seconds(told)}


def _named(operation: str, block: int) -> str:
    return f"{operation} {block // _MIB}M" if block else operation


def _operations(results: Samples[Sample]) -> list[str]:
    return list(dict.fromkeys(one.operation for one in results.samples))


def _summary(results: Samples[Sample]) -> dict[str, Any]:
    return {
        row: {
            operation: plain(results.spread(row, _RATE, operation=operation))
            for operation in _operations(results)
            if operation != LATENCY
        }
        for row in ROWS
    }


def _tables(results: Samples[Sample]) -> Group:
    best = {f"deepspeed, {one}": words for one, words in results.extra["best"].items()}
    return tables.page(
        results,
        _table(results, "GB/s", _RATE),
        "",
        _table(results, "processor seconds per GB", _PROCESSOR),
        *tables.notes(results.errors(), ROWS | best),
        _ratios(results),
    )


def _table(results: Samples[Sample], unit: str, figure: str) -> Table:
    size, rounds = results.settings["size_bytes"] / 1e9, results.settings["rounds"]
    operations = [one for one in _operations(results) if one != LATENCY]
    return tables.figures(
        f"{unit}: {size:.2f} GB, {rounds} interleaved rounds, median [least, most]",
        operations,
        {
            row: [tables.cell(results.spread(row, figure, operation=one)) for one in operations]
            for row in ROWS
        },
    )


def _ratios(results: Samples[Sample]) -> Table:
    found = []
    pairs = [(PENSTOCK, DEEPSPEED), (PENSTOCK, FIO), (PENSTOCK_REUSED, FIO)]
    pairs.append((PENSTOCK_PLAIN, DEEPSPEED_PLAIN))
    for operation in _operations(results):
        rates = (
            {"seconds": operation}
            if operation == LATENCY
            else {_RATE: operation, _PROCESSOR: f"{operation}, processor"}
        )
        for upper, lower in pairs:
            for figure, words in rates.items():
                ratio = results.ratio(upper, lower, figure=figure, operation=operation)
                found.append((f"{upper} / {lower}, {words}", ratio))
    for row in (PENSTOCK, FIO):
        waits = results.spread(row, lambda one: one.seconds * 1e6, operation=LATENCY)
        found.append((f"{row}, microseconds of a 4 KiB read", waits))
    return tables.ratios(found, "ratio")


if __name__ == "__main__":
    main()
