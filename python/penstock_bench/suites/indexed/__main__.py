"""The command behind `make bench SUITE=indexed`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.common.machine.limits import Limit, LimitError, limited
from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import storage, tables
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample, Samples
from penstock_bench.results.spread import plain
from penstock_bench.suites.indexed import worker
from penstock_bench.suites.indexed.worker import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Group

OURS, MMAP, FILE = "penstock", "mmap", "file"
READERS = {
    OURS: "open_indexed(…).stream of rows; GPTDataset under enable(datasets=True)",
    MMAP: "Megatron-Core's IndexedDataset, which maps the data file (its default)",
    FILE: "the same with mmap=False, which opens the file for each row",
}
WAYS = {
    "rows": f"{worker.ROW_BATCH} rows at random to a batch",
    "gpt": f"samples of {worker.SEQUENCE_TOKENS} tokens, {worker.MICRO_BATCH} to a batch",
}
CACHES = {
    "cold": "nothing in the page cache",
    "small": "the same, in a control group with memory for a quarter of the data",
    "warm": "all of it in the page cache",
}
_DATA_BYTES, _QUICK_BYTES = 4 << 30, 64 << 20
_BATCHES, _QUICK_BATCHES = {"rows": 300, "gpt": 1500}, {"rows": 20, "gpt": 50}
_SECONDS_MAX = 15.0
"""With less memory than data, a map reads as much ahead at each row as the device is set to, and it
is dropped before it is used: some MiB a row, minutes for all batches."""
_SETTLE_SECONDS_MAX = 3.0
"""Only reads are measured: nothing on the device has to end before."""


@suite(
    "indexed",
    READERS,
    "Who reads",
    preload=["penstock_bench.suites.indexed.worker", "penstock", "torch", *worker.MODULES],
    timeout_seconds=120.0,
)
def main(run: Run) -> Report:
    """Rows and samples of an indexed dataset of Megatron-Core."""
    data_bytes = _QUICK_BYTES if run.is_quick else _DATA_BYTES
    batches = _QUICK_BATCHES if run.is_quick else _BATCHES
    with run.at_work(2 * data_bytes, data_bytes=data_bytes, batches=batches) as place:
        files = [place / "texts.bin", place / "texts.idx"]

        def task(name: str, way: str, group: str | None, seed: int) -> Task:
            return Task(name, way, str(place), group, data_bytes, batches[way], _SECONDS_MAX, seed)

        run.say("dataset")
        run.results.settings["dataset"] = run.child(worker.prepare, task(MMAP, "gpt", None, 0))
        storage.sync_files(files)
        heads: dict[tuple[int, str], list[int]] = {}
        turns = [(name, way, cache) for way in WAYS for cache in CACHES for name in run.names]
        for index, (name, way, cache) in run.in_rounds(turns, ", ".join):
            quiesce(place, seconds_max=_SETTLE_SECONDS_MAX)
            try:
                with _at_rest(run, cache, files, data_bytes) as limit:
                    group = None if limit is None else str(limit.processes)
                    job = task(name, way, group, index + 1)
                    found = run.child(worker.run, job, (name, way, cache))
                    if limit is not None and "error" not in found:
                        found["group_peak_bytes"] = limit.peak_bytes
            except LimitError as error:
                found = {"error": f"skipped: memory cannot be limited: {error}"}
            sample = run.results.add(Sample(name, index, f"{way}-{cache}"), found)
            own = found.get("heads", [])
            others = heads.setdefault((index, way), own)
            if any(one != other for one, other in zip(own, others, strict=False)):
                sample.error = "has read other tokens than the reader before it"
    return Report(_tables(run.results), {"ratios": _ratios(run.results)})


@contextlib.contextmanager
def _at_rest(
    run: Run, cache: str, files: Sequence[Path], data_bytes: int
) -> Iterator[Limit | None]:
    """Fills or empties the page cache; yields the control group of the process, if it has one.

    Raises:
        LimitError: There can be no such group here.
    """
    if cache == "warm":
        for path in files:
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass
    else:
        storage.drop(files)
    if cache != "small":
        yield None
        return
    # An interpreter with PyTorch and Megatron-Core needs some memory, too.
    nbytes = data_bytes // 4 + (512 << 20 if run.is_quick else 0)
    with limited(nbytes) as limit:
        yield limit


def rate(one: Sample) -> float:
    """Rows or samples a second."""
    count: int = one.detail["samples"]
    return count / one.seconds


def _ratios(results: Samples[Sample]) -> dict[str, object]:
    return {
        f"{way}-{cache}": plain(results.ratio(OURS, MMAP, figure=rate, operation=f"{way}-{cache}"))
        for way in WAYS
        for cache in CACHES
    }


def _tables(results: Samples[Sample]) -> Group:
    found = []
    for way, words in WAYS.items():
        operations = [f"{way}-{cache}" for cache in CACHES]
        rows = {
            name: [
                tables.cell(value, form)
                for one in operations
                for value, form in (
                    (results.spread(name, rate, operation=one), ",.0f"),
                    (results.ratio(name, MMAP, figure=rate, operation=one), ".3g"),
                )
            ]
            for name in READERS
        }
        columns = [column for cache in CACHES for column in (f"{cache}: a second", "/ mmap")]
        title = f"{words}; {results.settings['rounds']} interleaved rounds, median [least, most]"
        found.append(tables.figures(title, columns, rows))
    lines = [f"  {cache}: {words}" for cache, words in CACHES.items()]
    peaks = [one.detail.get("group_peak_bytes") for one in results.samples]
    if known := [peak for peak in peaks if peak]:
        least, most = min(known) >> 20, max(known) >> 20
        lines.append(f"  peak of the groups, page cache included: {least} to {most} MiB")
    read_ahead = results.disk.get("queue", {}).get("read_ahead_kb", "unknown")
    lines += [
        f"  KiB that the kernel reads ahead for a map, as the device is set: {read_ahead}",
        f"  a process reads all batches, or those of {_SECONDS_MAX:.0f} s",
    ]
    return tables.page(results, *found, *tables.notes(results.errors(), READERS), *lines)


if __name__ == "__main__":
    main()
