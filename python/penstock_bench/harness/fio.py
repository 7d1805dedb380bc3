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


def job(command: list[str]) -> dict[str, Any]:
    """Runs a command of one job, or group of jobs, and returns fio's report; see `jobs`."""
    return jobs(command)[0]


def jobs(command: list[str]) -> list[dict[str, Any]]:
    """Runs a command and returns fio's report on each job, or group of jobs.

    Args:
        command: With ``--output-format=json``.

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

    Leaves nothing behind. A case that fio cannot run is a measurement with an error.

    Args:
        case: What to measure.
        directory: Where; must not exist, and does not afterwards.
        total_bytes: Of all processes.
        seed: Which blocks are read at random.
        round_index: The round.
    """
    made = Measurement(case=case.label, by="fio", round_index=round_index)
    if case.device is not None:
        made.path = cases.HOST_ONLY
    if case.tensors or case.method in _NOT_OF_FIO:
        made.error = "fio has no tensors" if case.tensors else _NOT_OF_FIO[case.method]
        return made
    quiesce_after(directory.parent, total_bytes)
    directory.mkdir()
    try:
        command = _command(case, directory, total_bytes, seed)
        if case.pattern != "write":
            # The run below reports the error, if this fails.
            subprocess.run([*command, "--create_only=1"], capture_output=True, check=False)
            quiesce_after(directory, total_bytes)
        told = job(command)
    except FioError as error:
        made.error = str(error)
        return made
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _take(made, told, told["write" if case.pattern == "write" else "read"])
    made.is_direct = case.direct
    made.setup = " ".join(command[1:])
    return made


def _command(case: Case, directory: Path, total_bytes: int, seed: int) -> list[str]:
    jobs = case.processes * case.threads
    each = share_bytes(case, total_bytes) // case.threads
    command = [
        "fio",
        "--name=bench",
        f"--directory={directory}",
        f"--rw={_RW[case.pattern]}",
        f"--ioengine={'psync' if case.method == 'posix' else 'io_uring'}",
        f"--direct={int(case.direct)}",
        f"--bs={case.block_bytes}",
        f"--iodepth={case.depth}",
        f"--numjobs={jobs}",
        f"--size={each}",
        f"--randseed={seed}",
        "--group_reporting",
        "--fallocate=native",
        "--scramble_buffers=0",
        "--norandommap=1",
        "--iomem_align=2m",
        # Else it tells the kernel to read ahead twice as far, which nobody else here does.
        "--fadvise_hint=0",
        "--lat_percentiles=1",
        f"--percentile_list={':'.join(map(str, _PERCENTILES))}",
        "--output-format=json",
    ]
    if case.method == "uring_registered":
        command += ["--fixedbufs=1", "--registerfiles=1"]
    if case.pattern == "write" and case.syncs:
        command.append("--end_fsync=1")
    if case.seconds is not None:
        command += ["--time_based=1", f"--runtime={round(case.seconds * 1000)}ms"]
    if case.threads > 1:
        command.append("--thread")
    return command


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
