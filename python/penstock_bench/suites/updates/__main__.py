"""The command behind `make bench SUITE=updates`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.common.machine.limits import LimitError, limited
from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import tables
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample, Samples
from penstock_bench.results.spread import plain
from penstock_bench.suites.updates import worker
from penstock_bench.suites.updates.worker import ROW_BYTES, Task

if TYPE_CHECKING:
    from rich.console import Group

TABLE, PWRITE, QUEUE, ROCKSDICT = "table", "pwrite", "queue", "rocksdict"
WRITERS = {
    TABLE: "penstock.features.Table: update and flush; without compaction",
    PWRITE: "os.pwrite of each row in its place, in order, through the page cache, and fdatasync",
    QUEUE: "penstock.offload.TensorIO.write_all of the rows in their places, and fdatasync",
    ROCKSDICT: "RocksDB by rocksdict: a WriteBatch with its log, the last one of a flush synced",
}

_ROWS, _QUICK_ROWS = 4_000_000, 100_000
_MEMORY_BYTES = 512 << 20
_BATCH_ROWS, _BATCHES, _FLUSHES, _QUICK_FLUSHES = 4096, 8, 4, 1
_FREE_TIMES = 8


@suite(
    "updates",
    WRITERS,
    "Who writes",
    preload=["penstock_bench.suites.updates.worker"],
    timeout_seconds=900.0,
)
def main(run: Run) -> Report:
    """Rows of a table larger than memory, written anew and made durable."""
    sizes = {
        "rows": _QUICK_ROWS if run.is_quick else _ROWS,
        "batch_rows": _BATCH_ROWS,
        "batches": _BATCHES,
        "flushes": _QUICK_FLUSHES if run.is_quick else _FLUSHES,
    }
    needed_bytes = _FREE_TIMES * sizes["rows"] * ROW_BYTES
    with run.at_work(needed_bytes, row_bytes=ROW_BYTES, **sizes) as place:

        def task(name: str, group: str | None, seed: int) -> Task:
            return Task(name, str(place / name), group, seed=seed, **sizes)

        for name in run.each(run.names, lambda name: f"table of {name}"):
            run.child(worker.prepare, task(name, None, 0), name)
        for index, name in run.in_rounds(run.names):
            quiesce(place)
            with contextlib.ExitStack() as stack:
                group = _limited(run, stack)
                found = run.child(worker.run, task(name, group, index + 1), name)
            sample = Sample(name, index, error=found.pop("error", None))
            sample.nbytes = sizes["batch_rows"] * sizes["batches"] * sizes["flushes"] * ROW_BYTES
            sample.take(found)
            run.results.samples.append(sample)
    others = [name for name in WRITERS if name != TABLE]
    return Report(
        _tables(run.results),
        {
            "rates": {name: plain(run.results.spread(name, rate)) for name in WRITERS},
            "ratios": {name: plain(run.results.ratio(TABLE, name, figure=rate)) for name in others},
        },
    )


def _limited(run: Run, stack: contextlib.ExitStack) -> str | None:
    """Limits memory by a control group, where one can be made; returns its file of processes."""
    try:
        limit = stack.enter_context(limited(_MEMORY_BYTES))
    except LimitError as error:
        run.results.settings["memory"] = f"not limited: {error}"
        return None
    run.results.settings["memory"] = f"{_MEMORY_BYTES >> 20} MiB, by a control group"
    return str(limit.processes)


def rate(one: Sample) -> float:
    """Rows a second."""
    return one.nbytes / ROW_BYTES / one.seconds


def _cpu_seconds(one: Sample) -> float:
    """Processor time of a million rows."""
    return one.cpu_seconds / (one.nbytes / ROW_BYTES) * 1e6


def _tables(results: Samples[Sample]) -> Group:
    settings = results.settings
    rows = {
        name: [
            tables.cell(results.spread(name, rate), ",.0f"),
            tables.cell(results.spread(name, _cpu_seconds)),
            tables.cell(results.ratio(TABLE, name, figure=rate) if name != TABLE else None),
        ]
        for name in WRITERS
    }
    table = tables.figures(
        f"{settings['row_bytes']}-byte rows at random of {settings['rows']:,}, a flush every"
        f" {settings['batches'] * settings['batch_rows']:,}; {settings['rounds']} interleaved"
        " rounds, median [least, most]",
        ["rows a second", "s of processor a million", "the table writes, times as many"],
        rows,
    )
    lines = [f"  memory: {settings['memory']}"]
    if compacted := results.spread(TABLE, "compaction_seconds"):
        lines.insert(0, f"  to compact them takes {compacted.with_range('.3g')} s")
    return tables.page(results, table, *tables.notes(results.errors(), WRITERS), *lines)


if __name__ == "__main__":
    main()
