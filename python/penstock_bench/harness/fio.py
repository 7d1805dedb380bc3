"""The same case by fio, so that a figure can be held against one that everybody knows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from penstock.common.machine.quiesce import quiesce_after
from penstock.errors import PenstockError
from penstock_bench.harness import cases
from penstock_bench.harness.cases import share_bytes
from penstock_bench.results.results import Measurement

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.harness.cases import Case

MISSING = "fio is not on PATH: install it (Debian, Ubuntu: apt-get install fio)"

_NOT_OF_FIO = {"threads": "fio has no pool of threads", "cufile": "fio is not asked for cuFile"}
_RW = {"write": "write", "read": "read", "random_read": "randread"}
_PERCENTILES = (50, 90, 99, 99.9, 99.99)


class FioError(PenstockError):
    """fio is missing, or failed."""


def is_there() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


def command(**options: object) -> list[str]:
    """A command of a job by io_uring past the page cache, which reports as JSON.

    The buffers of a job begin with a huge page, or they would lie across two. ``bs=4096`` is
    ``--bs=4096``, True an option without a value, and None leaves an option out.
    """
    usual = {"name": "bench", "ioengine": "io_uring", "direct": 1, "iomem_align": "2m"}
    given = {**usual, **options, "output-format": "json"}.items()
    told = [
        (name, "" if value is True else f"={value}") for name, value in given if value is not None
    ]
    return ["fio", *(f"--{name}{value}" for name, value in told)]


def job(command: list[str]) -> dict[str, Any]:
    """Runs a command of one job, or group of jobs, and returns fio's report; see `jobs`."""
    return jobs(command)[0]


def jobs(command: list[str]) -> list[dict[str, Any]]:
    """Runs a command and returns fio's report on each job, or group of jobs.

    Raises:
        FioError: fio is missing, or failed.
    """
    if not is_there():
        raise FioError(MISSING)
    # Buffers in huge pages and not across them, as ours are: requests of few segments. Without
    # that fio writes a tenth slower, at twice as many segments.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise FioError(" ".join((done.stderr or done.stdout).split())[-300:])
    # Notes of fio's may stand before the JSON.
    told: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return told


def cpu_seconds(told: dict[str, Any]) -> float:
    """Processor time of a job, from fio's report on it."""
    seconds: float = (told["usr_cpu"] + told["sys_cpu"]) / 100 * told["job_runtime"] / 1000
    return seconds


def run(
    case: Case, directory: Path, total_bytes: int, *, seed: int, round_index: int
) -> Measurement:
    """Measures a case with fio at equal settings.

    Leaves nothing behind. A case that fio cannot run is a measurement with an error. The
    directory must not exist, and does not afterwards.
    """
    made = Measurement(case=case.label, by="fio", round_index=round_index)
    if case.device is not None:
        made.path = cases.HOST_ONLY
    if case.tensors or case.method in _NOT_OF_FIO:
        made.error = "fio has no tensors" if case.tensors else _NOT_OF_FIO[case.method]
        return made
    quiesce_after(directory.parent, total_bytes)
    directory.mkdir()
    called = _command(case, directory, total_bytes, seed)
    try:
        if case.pattern != "write":
            # The run below reports the error, if this fails.
            subprocess.run([*called, "--create_only=1"], capture_output=True, check=False)
            quiesce_after(directory, total_bytes)
        told = job(called)
    except FioError as error:
        made.error = str(error)
        return made
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _take(made, told, told["write" if case.pattern == "write" else "read"])
    made.is_direct = case.direct
    made.setup = " ".join(called[1:])
    return made


def _command(case: Case, directory: Path, total_bytes: int, seed: int) -> list[str]:
    is_registered = 1 if case.method == "uring_registered" else None
    has_time = case.seconds is not None
    return command(
        directory=directory,
        rw=_RW[case.pattern],
        ioengine="psync" if case.method == "posix" else "io_uring",
        direct=int(case.direct),
        bs=case.block_bytes,
        iodepth=case.depth,
        numjobs=case.processes * case.threads,
        size=share_bytes(case, total_bytes) // case.threads,
        randseed=seed,
        group_reporting=True,
        fallocate="native",
        scramble_buffers=0,
        norandommap=1,
        # Else it tells the kernel to read ahead twice as far, which nobody else here does.
        fadvise_hint=0,
        lat_percentiles=1,
        percentile_list=":".join(map(str, _PERCENTILES)),
        fixedbufs=is_registered,
        registerfiles=is_registered,
        end_fsync=1 if case.pattern == "write" and case.syncs else None,
        time_based=1 if has_time else None,
        runtime=f"{round((case.seconds or 0) * 1000)}ms" if has_time else None,
        thread=case.threads > 1 or None,
    )


def _take(made: Measurement, told: dict[str, Any], side: dict[str, Any]) -> None:
    made.nbytes = side["io_bytes"]
    made.requests = side["total_ios"]
    # The sync at the end is in it.
    made.seconds = side["runtime"] / 1000
    if not made.seconds:
        made.error = "fio counts milliseconds, and it took none: choose a larger size"
        return
    made.cpu_seconds = cpu_seconds(told)
    latency = side["lat_ns"]
    found = {float(name): value / 1000 for name, value in latency.get("percentile", {}).items()}
    made.latency_us = {
        "mean": latency["mean"] / 1000,
        **{f"p{percent:g}": found[percent] for percent in _PERCENTILES if percent in found},
        "max": latency["max"] / 1000,
    }
