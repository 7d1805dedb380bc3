"""Runs each measurement in a process of its own, so that memory and caches are not shared."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil

from penstock_bench.harness.options import free_port
from penstock_bench.harness.running import described

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

# Forked from a process that has imported what all need and done nothing else: as good as a fresh
# interpreter, and half of the run is not spent on importing PyTorch from a cold page cache.
_FORKS = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Names modules to import before processes are forked. Call it before the first `run`."""
    _preloaded[:] = modules


def run(
    function: Callable[[Any], dict[str, Any]],
    arguments: Sequence[object],
    place: Path,
    timeout_seconds: float,
) -> list[dict[str, Any]]:
    """Calls a function for each argument, each in a process of its own, all at the same time.

    The timeout is for all of them, and what they leave is in the directory.

    Returns:
        The results of the calls, or ``{"error": …}``.
    """
    # Not before: it is a setting of the whole interpreter, and who imports a benchmark may have
    # other forks.
    _FORKS.set_forkserver_preload(_preloaded)
    results = [place / f"result-{index}.json" for index in range(len(arguments))]
    logs = [place / f"log-{index}" for index in range(len(arguments))]
    for path in results:
        path.unlink(missing_ok=True)
    processes = [
        _FORKS.Process(target=_main, args=(function, argument, result, log))
        for argument, result, log in zip(arguments, results, logs, strict=True)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    stopped = [process.is_alive() for process in processes]
    for process in processes:
        _end(process)
    return [
        {"error": f"stopped after {timeout_seconds:.0f} s"}
        if was_stopped
        else _result(process.exitcode, result, log)
        for was_stopped, process, result, log in zip(stopped, processes, results, logs, strict=True)
    ]


def launch_alone() -> None:
    """Says in the environment that this process is the only rank, as a launcher would."""
    one = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in one.items()}, MASTER_ADDR="127.0.0.1")


def _main(
    function: Callable[[Any], dict[str, Any]], argument: object, result_path: Path, log_path: Path
) -> None:
    """Calls the function; what libraries print goes to the log."""
    with log_path.open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    try:
        result = function(argument)
    except BaseException as error:
        result_path.write_text(json.dumps({"error": described(error)}))
        raise
    result_path.write_text(json.dumps(result, default=str))


def _end(process: Any) -> None:
    """Kills a process that is still there, with those that it started."""
    if not process.is_alive():
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.join()


def _result(exit_code: int | None, result_path: Path, log_path: Path) -> dict[str, Any]:
    if result_path.exists():
        fields: dict[str, Any] = json.loads(result_path.read_text())
        return fields
    tail = " ".join(log_path.read_text(errors="replace").split())[-200:]
    return {"error": f"ended with code {exit_code}: {tail}"}
