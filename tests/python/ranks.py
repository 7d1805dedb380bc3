"""Ranks for tests: processes that are one `torch.distributed` job over gloo.

They are forked from a server that has imported PyTorch, as importing it takes longer than most
tests. Each waits for functions to call, which have to be importable: `Job.call` calls one on all
ranks, and returns each result or exception. A rank that does not answer in time fails the test,
with the stacks of all its threads on standard error.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import forks
import penstock
from penstock.errors import RankError

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

IMPORTS = [*forks.IMPORTS_OF_RANKS, "penstock", "pytest"]
_START_SECONDS = 120

_THREADS_MAX = 24
"""A process with more threads is replaced.

A mesh keeps its groups' threads, three for each, for the life of the process, and one of them polls
a hundred times a second. After some hundred tests that takes half a processor.
"""

SIZE = 4

TIMEOUT_SECONDS = 3
"""Timeout for a missing rank, in tests where one is missing."""

IMPATIENT = penstock.Options(rank_timeout_seconds=TIMEOUT_SECONDS)

_processes = forks.fork_server(IMPORTS)


class Job:
    """A job of some ranks.

    Args:
        size: Number of ranks.
        is_hosted: Whether this process hosts the job's key-value store, as with torchrun; otherwise
            rank 0 does, and the store dies with it.
    """

    def __init__(self, size: int = SIZE, *, is_hosted: bool = True) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port, own = (self.store.port, False) if is_hosted else (free_port(), True)
        self._pipes = []
        self._processes = []
        for rank in range(size):
            here, there = _processes.Pipe()
            process = _processes.Process(
                target=_serve, args=(there, rank, size, port, own and rank == 0), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.is_broken = False
        self._collect(range(size), _START_SECONDS)

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        timeout_seconds: float = 60,
    ) -> list[Any]:
        """Returns the results of ``function(*arguments)``, in the order of ranks.

        Raises:
            Exception: The exception of the first rank that failed by itself. A rank that learns of
                another rank's failure before it fails too raises `RankError`: which ranks do so
                depends on their speed.
        """
        found = self.outcomes(function, *arguments, ranks=ranks, timeout_seconds=timeout_seconds)
        failures = [one for one in found if isinstance(one, BaseException)]
        if failures:
            raise next((e for e in failures if not isinstance(e, RankError)), failures[0])
        return found

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        timeout_seconds: float = 60,
    ) -> list[Any]:
        """Returns the result or exception of each rank."""
        chosen = range(len(self._pipes)) if ranks is None else list(ranks)
        self.start(function, *arguments, ranks=chosen, timeout_seconds=timeout_seconds)
        return self.finish(ranks=chosen, timeout_seconds=timeout_seconds)

    def start(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        timeout_seconds: float = 60,
    ) -> None:
        """Starts a function on ranks, without waiting for it."""
        for rank in range(len(self._pipes)) if ranks is None else ranks:
            module, name = function.__module__, function.__qualname__
            self._pipes[rank].send((module, name, arguments, timeout_seconds))

    def finish(
        self, *, ranks: Iterable[int] | None = None, timeout_seconds: float = 60
    ) -> list[Any]:
        """Waits for started functions; returns the result or exception of each rank."""
        chosen = range(len(self._pipes)) if ranks is None else ranks
        return self._collect(chosen, timeout_seconds + 5)

    def _collect(self, ranks: Iterable[int], timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        found = []
        for rank in ranks:
            try:
                if not self._pipes[rank].poll(max(deadline - time.monotonic(), 0)):
                    raise EOFError
                found.append(self._pipes[rank].recv())
            except EOFError:
                self.is_broken = True
                pytest.fail(f"rank {rank} has not answered within {timeout_seconds} s, or died")
        return found

    def threads(self) -> int:
        """Returns the highest number of threads in any rank."""
        return max(len(os.listdir(f"/proc/{one.pid}/task")) for one in self._processes)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank."""
        os.kill(self._processes[rank].pid, number)

    def close(self) -> None:
        """Ends all ranks, in order if none has failed."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if self.is_broken:
                process.kill()
            else:
                pipe.send(None)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def free_port() -> int:
    """Returns an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environments_of(ranks: int) -> list[dict[str, str]]:
    """Returns torchrun's environment variables for each rank of one machine."""
    common = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": 1,
    }
    return [
        {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        for rank in range(ranks)
    ]


def _serve(pipe: Connection, rank: int, size: int, port: int, is_master: bool) -> None:
    """Runs one rank."""
    assert "torch._dynamo" in sys.modules, "somebody else has begun the server, with less imported"
    torch.set_num_threads(1)
    # Memory that all ranks share is copied where a garbage collection visits it.
    gc.freeze()
    store = dist.TCPStore("127.0.0.1", port, size, is_master, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        module, name, arguments, timeout_seconds = task
        faulthandler.dump_traceback_later(timeout_seconds, exit=True)
        try:
            answer = getattr(importlib.import_module(module), name)(*arguments)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error.with_traceback(None)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
    dist.destroy_process_group()


class Pool:
    """One job of each size for all tests, replaced if a test breaks it or adds too many threads."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}

    def of(self, size: int) -> Job:
        """Returns the job of a size."""
        job = self._jobs.get(size)
        if job is None or job.is_broken or job.threads() > _THREADS_MAX:
            if job is not None:
                job.close()
            job = self._jobs[size] = Job(size)
        return job

    def close(self) -> None:
        """Ends all jobs."""
        for job in self._jobs.values():
            job.close()
