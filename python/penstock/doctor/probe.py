"""Measures requests to a file of a directory, in a separate process.

`main` reads a job of the native module as JSON from standard input and prints its outcome. In its
own process, Ctrl-C ends it at once, and it keeps no memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import penstock
from penstock import _native
from penstock.common.machine.quiesce import quiesce_after
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MIB = 1 << 20
_HEAD_START_SECONDS = 0.05


class ProbeError(PenstockError):
    """A measurement could not be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequests:
    """Requests of one kind to one file.

    Attributes:
        pattern: The kind of access.
        is_direct: Whether they bypass the page cache.
        method: How they reach the kernel.
        block_bytes: Size of a request.
        depth: Requests in flight.
        seconds: Duration; None for one pass over the file.
    """

    pattern: Literal["write", "read", "random_read"] = "write"
    is_direct: bool
    method: Literal["uring", "threads"]
    block_bytes: int = _MIB
    depth: int = 16
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates that include the sync after writes.

    Attributes:
        gb_per_second: GB (10**9 bytes) per second.
        requests_per_second: IOPS.
    """

    gb_per_second: float
    requests_per_second: float


def measure(requests: ProbeRequests, directory: Path, total_bytes: int) -> Rates:
    """Measures requests; a file to read is written first, untimed. Removes its files.

    Args:
        requests: The kind of requests.
        directory: A directory to create, which must not exist; it is removed afterwards.
        total_bytes: Size of the file, rounded down to blocks; one block at least.

    Raises:
        ProbeError: The measuring process failed.
    """
    quiesce_after(directory.parent, total_bytes)
    directory.mkdir()
    job = _job(requests, directory, total_bytes)
    try:
        if requests.pattern != "write":
            depth = 8 if requests.method == "threads" else requests.depth
            _run({**job, "pattern": "write", "seconds": None, "depth": depth})
            quiesce_after(directory, total_bytes)
        outcome = _run(job)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    seconds = outcome["seconds"] + outcome["sync_seconds"]
    return Rates(outcome["bytes"] / seconds / 1e9, outcome["requests"] / seconds)


def _job(requests: ProbeRequests, directory: Path, total_bytes: int) -> dict[str, Any]:
    blocks = max(1, total_bytes // requests.block_bytes)
    return {
        "directory": str(directory),
        "process": 0,
        "processes": 1,
        "method": requests.method,
        "direct": requests.is_direct,
        "layout": "file_per_process",
        "aggregated": True,
        "pattern": requests.pattern,
        "tensors": [blocks * requests.block_bytes],
        "copies": False,
        "block_bytes": requests.block_bytes,
        "depth": requests.depth,
        "threads": 1,
        "allocates": True,
        "syncs": True,
        "seconds": requests.seconds,
        "device": None,
        "seed": 1,
        "verifies": False,
    }


def _run(job: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-c", "from penstock.doctor.probe import main; main()"]
    # Keeps files of the user's directory, such as a numpy.py, from being imported.
    if Path(penstock.__file__).parents[1] != Path.cwd():
        command.insert(1, "-P")
    done = subprocess.run(
        command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode or not done.stdout:
        raise ProbeError(f"the measuring process ended with {done.returncode}")
    outcome: dict[str, Any] = json.loads(done.stdout)
    if "error" in outcome:
        raise ProbeError(outcome["error"])
    return outcome


def main() -> None:
    """Runs the job on standard input."""
    try:
        bench = _native.Bench(sys.stdin.read())
        outcome = bench.run(time.monotonic() + _HEAD_START_SECONDS)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        outcome = json.dumps({"error": str(error)})
    sys.stdout.write(outcome)
