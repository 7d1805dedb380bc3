"""The command behind `make bench SUITE=optimizer`."""

from __future__ import annotations

import os
import shutil
import statistics
from typing import TYPE_CHECKING

from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import fio, tables
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample, Samples, quotient
from penstock_bench.results.spread import Spread, plain
from penstock_bench.suites.optimizer import worker
from penstock_bench.suites.optimizer.worker import Task

if TYPE_CHECKING:
    from rich.console import Group

PENSTOCK, ZERO, ZERO_OURS = "penstock", "deepspeed", "deepspeed-ours"
FIO_READ, FIO_WRITE, FIO_BOTH = "fio read", "fio write", "fio both"
SAVE, COPY = "save", "copy"
STEPPERS = (PENSTOCK, ZERO, ZERO_OURS)
ROWS = {
    PENSTOCK: "a step of AdamW with masters, durable when it returns",
    ZERO: "a step of ZeRO-Infinity's pipelined swapper, its own async_io; not synced",
    ZERO_OURS: "the same by Penstock's async_io",
    FIO_READ: "as many bytes read as the state has, io_uring, O_DIRECT",
    FIO_WRITE: "as many written over, and synced",
    FIO_BOTH: "both at the same time",
    SAVE: "penstock.save of the optimizer's state, which links its files",
    COPY: "a copy of those files, synced",
}
_RATIOS = (
    (ZERO, PENSTOCK),
    (ZERO_OURS, PENSTOCK),
    (PENSTOCK, FIO_BOTH),
    (FIO_BOTH, FIO_READ),
    (FIO_BOTH, FIO_WRITE),
    (COPY, SAVE),
)

_LAYERS, _QUICK_LAYERS = 8, 2
_STEPS = 5
_MEMORY_BYTES = 512 << 20
_FREE_TIMES_STATE = 5


@suite(
    "optimizer",
    (*STEPPERS, FIO_READ, FIO_WRITE, FIO_BOTH),
    "What is measured",
    preload=["penstock_bench.suites.optimizer.worker"],
)
def main(run: Run) -> Report:
    """Steps of AdamW with its state on storage."""
    # The comparison is on the CPU also where there are GPUs.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    layers = _QUICK_LAYERS if run.is_quick else _LAYERS
    state_bytes = layers * worker.WIDTH**2 * worker.STATE_BYTES
    settings = {"state_bytes": state_bytes, "memory_bytes": _MEMORY_BYTES, "steps": _STEPS}
    with run.at_work(_FREE_TIMES_STATE * state_bytes, layers=layers, **settings):
        run.results.extra["save_bytes"] = 0
        if any(name not in STEPPERS for name in run.names):
            run.say("files of fio")
            _fio([_job(run, "a", "write"), _job(run, "b", "write")])
        for index, name in run.in_rounds(run.names):
            quiesce(run.place)
            if name in STEPPERS:
                _steps(run, name, index)
            else:
                _bound(run, name, index)
    results = run.results
    return Report(_tables(results), {"seconds": {row: plain(results.spread(row)) for row in ROWS}})


def _steps(run: Run, name: str, index: int) -> None:
    """Measures the steps of one optimizer; of Penstock's also a save."""
    directory = run.place / "steps"
    directory.mkdir()
    settings = run.results.settings
    task = Task(
        name, str(directory), settings["layers"], settings["memory_bytes"], settings["steps"]
    )
    try:
        found = run.child(worker.run, task)
    finally:
        shutil.rmtree(directory)
    sample = Sample(name, index, error=found.get("error"))
    if sample.error is None:
        sample.seconds = statistics.median(found["seconds"])
        sample.cpu_seconds = found["cpu_seconds"] / len(found["seconds"])
    run.results.samples.append(sample)
    if "save_seconds" in found:
        run.results.extra["save_bytes"] = found["save_bytes"]
        for row, key in ((SAVE, "save_seconds"), (COPY, "copy_seconds")):
            run.results.samples.append(Sample(row, index, seconds=found[key]))


def _bound(run: Run, name: str, index: int) -> None:
    """Measures what fio takes for as many bytes as the state has."""
    jobs = {
        FIO_READ: [_job(run, "a", "read")],
        FIO_WRITE: [_job(run, "b", "write")],
        FIO_BOTH: [_job(run, "a", "read"), _job(run, "b", "write")],
    }[name]
    sample = Sample(name, index)
    try:
        sample.seconds = _fio(jobs)
    except FioError as error:
        sample.error = str(error)
    run.results.samples.append(sample)


def _job(run: Run, name: str, operation: str) -> list[str]:
    command = [f"--name={operation}-{name}", f"--filename={run.place / f'fio-{name}'}"]
    command += [f"--rw={operation}", f"--size={run.results.settings['state_bytes']}", "--direct=1"]
    command += ["--bs=1m", "--iodepth=32", "--ioengine=io_uring", "--iomem_align=2m"]
    return command + ["--overwrite=1", "--end_fsync=1"] * (operation == "write")


def _fio(jobs: list[list[str]]) -> float:
    """Seconds until all jobs, which begin at once, have ended."""
    command = ["fio", "--output-format=json", *(part for job in jobs for part in job)]
    return float(max(one["job_runtime"] for one in fio.jobs(command))) / 1000


def _bound_ratio(results: Samples[Sample]) -> Spread | None:
    """A step as a multiple of the longer of reading and writing its state."""
    reads, writes = results.values(FIO_READ), results.values(FIO_WRITE)
    longer = {index: max(reads[index], writes[index]) for index in reads if index in writes}
    return quotient(results.values(PENSTOCK), longer)


def _tables(results: Samples[Sample]) -> Group:
    size, rounds = results.settings["state_bytes"] / 1e9, results.settings["rounds"]
    rows = {
        row: [
            tables.cell(results.spread(row)),
            tables.cell(results.spread(row, "cpu_seconds") if row in STEPPERS else None),
        ]
        for row in ROWS
    }
    saved = results.extra["save_bytes"]
    share = saved / results.settings["state_bytes"]
    found = [(f"{upper} / {lower}", results.ratio(upper, lower)) for upper, lower in _RATIOS]
    found.append((f"{PENSTOCK} / max({FIO_READ}, {FIO_WRITE})", _bound_ratio(results)))
    return tables.page(
        results,
        tables.figures(
            f"state of {size:.2f} GB, {rounds} interleaved rounds, median [least, most]",
            ["seconds", "of the processor"],
            rows,
        ),
        *tables.notes(results.errors(), ROWS),
        f"  a save wrote {saved} bytes, {share:.2e} of the state",
        tables.ratios(found),
    )


if __name__ == "__main__":
    main()
