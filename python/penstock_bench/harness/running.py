"""Runs a case on as many processes as it asks for."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import penstock
from penstock.common.machine.quiesce import quiesce_after
from penstock.errors import PenstockError
from penstock_bench.harness import cases
from penstock_bench.harness.cases import WRITTEN_DEPTH, share_bytes, tensor_sizes
from penstock_bench.results.results import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock_bench.harness.cases import Case

_T = TypeVar("_T")

_HEAD_START_SECONDS = 0.05
"""Between the last process being ready and all beginning."""

PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99, 100.0)


class BenchError(PenstockError):
    """A benchmark could not be run."""


def described(error: BaseException) -> str:
    """How a library failed, in one line for a table: it may in any way."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def unused(place: Path) -> Path:
    """A directory to work in that nobody else has, also no other machine that shares the place."""
    return place / f".penstock-bench-{secrets.token_hex(6)}"


def interpreter(module: str) -> list[str]:
    """The command that runs a module of ours in a process of its own."""
    command = [sys.executable, "-m", module]
    # Files in the user's directory, such as a numpy.py, must not replace libraries.
    if Path(penstock.__file__).parents[1] != Path.cwd():
        command.insert(1, "-P")
    return command


def run(
    case: Case, directory: Path, total_bytes: int, *, seed: int, verifies: bool, round_index: int
) -> Measurement:
    """Measures a case; what is read is written first, untimed.

    Leaves nothing behind.

    Args:
        case: What to measure.
        directory: Where; must not exist, and does not afterwards.
        total_bytes: Of all processes.
        seed: What is written, and which blocks are read at random.
        verifies: Whether every block says where it belongs, and is checked when it is read.
        round_index: The round.
    """
    quiesce_after(directory.parent, total_bytes)
    directory.mkdir()
    try:
        if case.pattern != "write":
            written = {**_job(case, directory, total_bytes, seed), "pattern": "write"}
            written |= {"seconds": None, "verifies": verifies, "copies": False, "device": None}
            if case.method in ("posix", "threads", "cufile"):
                written |= {"method": "threads", "depth": WRITTEN_DEPTH, "threads": 1}
            _launch(written, case.processes, seed)
            quiesce_after(directory, total_bytes)
        job = {**_job(case, directory, total_bytes, seed), "verifies": verifies}
        outcomes = _launch(job, case.processes, seed)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return _summed_up(case, outcomes, round_index)


def _job(case: Case, directory: Path, total_bytes: int, seed: int) -> dict[str, Any]:
    share = share_bytes(case, total_bytes)
    return {
        **case.as_json(),
        "directory": str(directory),
        "tensors": tensor_sizes(share) if case.tensors else [share],
        "copies": case.tensors,
        "allocates": True,
        "seed": seed,
    }


def _launch(job: dict[str, Any], processes: int, seed: int) -> list[dict[str, Any]]:
    children: list[subprocess.Popen[str]] = []
    # The first process makes a shared file, which the others open.
    begins_first = job["layout"] == "shared_file"
    try:
        for process in range(processes):
            child = subprocess.Popen(
                interpreter("penstock_bench.suites.io.child"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            children.append(child)
            _tell(child, json.dumps({**job, "process": process, "seed": seed}))
            if begins_first and process == 0:
                _hear(child)
        for child in children[int(begins_first) :]:
            _hear(child)
        start_at = time.monotonic() + _HEAD_START_SECONDS
        for child in children:
            _tell(child, str(start_at))
        return [_hear(child) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(line + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        # The child has printed the reason.
        _hear(child)


def _hear(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise BenchError(f"a process of the benchmark ended with {child.wait()}")
    said = json.loads(line)
    if isinstance(said, dict) and "error" in said:
        raise BenchError(said["error"])
    return said


def _summed_up(case: Case, outcomes: list[dict[str, Any]], round_index: int) -> Measurement:
    began = min(one["started_at"] for one in outcomes)
    # All of the slowest process.
    seconds = max(one["started_at"] + one["seconds"] - began for one in outcomes)
    synced = max(one["started_at"] + one["seconds"] + one["sync_seconds"] for one in outcomes)
    pairs = np.array([pair for one in outcomes for pair in one["latencies"]], np.int64)
    damaged = next((one["damaged"] for one in outcomes if one["damaged"]), None)
    if damaged is not None:
        raise BenchError(
            f"{damaged[0]}: what was read at byte {damaged[1]} is not what was written there"
        )
    length = max(len(one["timeline"]) for one in outcomes)
    timeline = np.zeros(length, np.int64)
    for one in outcomes:
        timeline[: len(one["timeline"])] += one["timeline"]
    metadata = {
        name: sum(one["metadata"][name] for one in outcomes) for name in outcomes[0]["metadata"]
    }
    is_direct = all(one["is_direct"] for one in outcomes)
    counts = [one["cufile"] for one in outcomes]
    return Measurement(
        case=case.label,
        by="penstock",
        round_index=round_index,
        nbytes=sum(one["bytes"] for one in outcomes),
        requests=sum(one["requests"] for one in outcomes),
        seconds=seconds,
        sync_seconds=max(0.0, synced - began - seconds),
        open_seconds=max(one["open_seconds"] for one in outcomes),
        cpu_seconds=sum(one["cpu_seconds"] for one in outcomes),
        latency_us=percentiles(pairs),
        timeline_bytes=timeline.tolist(),
        metadata=metadata,
        is_direct=is_direct,
        setup=outcomes[0]["setup"],
        path="" if case.device is None else cases.gpu_path(case, is_direct, counts),
        notes=[one["fallback"] for one in outcomes[:1] if one["fallback"]],
        rate_spread=[one["bytes"] / one["seconds"] / 1e9 for one in outcomes],
        checked=sum(one["checked"] for one in outcomes),
    )


def percentiles(pairs: np.ndarray[Any, Any]) -> dict[str, float]:
    """Latencies in microseconds that so many per cent of requests stay within.

    Pairs are nanoseconds and how many requests took that long, of shape (n, 2).
    """
    if not len(pairs):
        return {}
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    counted = np.cumsum(pairs[:, 1])
    wanted = np.ceil(np.array(PERCENTILES) / 100 * counted[-1])
    found = pairs[np.searchsorted(counted, np.maximum(wanted, 1)), 0] / 1000
    mean = float((pairs[:, 0] * pairs[:, 1]).sum() / counted[-1] / 1000)
    names = [f"p{percent:g}" for percent in PERCENTILES[:-1]]
    return {"mean": mean, **dict(zip([*names, "max"], map(float, found), strict=True))}


def rotated(items: Sequence[_T], number: int) -> list[_T]:
    """The items in the order of a round, from 0."""
    cut = number % len(items) if items else 0
    return [*items[cut:], *items[:cut]]


def run_module(module: str, job: dict[str, Any], *, timeout_seconds: float) -> dict[str, Any]:
    """Runs a module, which reads the job from its standard input, and ends what it has started.

    Its answer is an object of JSON on the last line that it prints.

    Returns:
        The printed object; ``"error"`` with the reason where nothing was printed.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen(
        interpreter(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(json.dumps(job), timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_seconds:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    if child.returncode == 0:
        found: dict[str, Any] = json.loads(out.strip().rpartition("\n")[2])
        return found
    if child.returncode == -signal.SIGKILL:
        return {"error": "ended by the kernel: the memory of its group was not enough"}
    return {"error": f"ended with {child.returncode}: {' '.join(err.split())[-300:]}"}
