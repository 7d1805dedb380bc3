"""Processes of one node that run the same phases, with a barrier before each."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from threading import BrokenBarrierError
from typing import TYPE_CHECKING

import node

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

_TIMEOUT_SECONDS = 900

_barrier: Barrier


@dataclass
class Worker:
    """One of the processes.

    Attributes:
        work: The directory of the job.
        local_index: Its number on this node.
        index: Its number among the processes of all nodes.
        count: Number of processes on all nodes.
        spans: For each phase its begin and end, in seconds of this node's clock, and its count.
        verified: Number of items that were right.
        to_verify: Number of items that were checked.
    """

    work: Path
    local_index: int
    index: int
    count: int
    spans: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    verified: int = 0
    to_verify: int = 0

    def phase(self, name: str, does: Callable[[], int]) -> None:
        """Waits for all processes, runs a phase, and records its duration.

        Args:
            name: Unique name of the phase; all processes use the same order.
            does: Runs the phase and returns the number of items.
        """
        self.gather(name)
        began = time.monotonic()
        done = does()
        self.spans[name] = (began, time.monotonic(), done)

    def gather(self, name: str) -> None:
        """Waits for all processes of all nodes."""
        _barrier.wait()
        if self.local_index == 0:
            node.meet(self.work, name)
        _barrier.wait()


def run(work: Path, processes: int, does: Callable[[Worker], None]) -> None:
    """Runs a function in each process and prints their combined results.

    Args:
        work: The directory of the job.
        processes: Number of processes on this node.
        does: Run by each process; calls `Worker.phase`.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes, timeout=_TIMEOUT_SECONDS)
    index, nodes = node.place()
    workers = [
        Worker(work, one, index * processes + one, nodes * processes) for one in range(processes)
    ]
    # Each process takes one call: no call ends before all have begun.
    with ProcessPoolExecutor(processes, context, _take, (barrier,)) as pool:
        begun = [pool.submit(_do, does, one) for one in workers]
    # Raises the cause first, not the broken barriers of the processes that waited for it.
    errors = [one.exception() for one in begun]
    for error in sorted(filter(None, errors), key=lambda one: isinstance(one, BrokenBarrierError)):
        raise error
    done = [one.result() for one in begun]
    phases = {}
    for name in done[0].spans:
        spans = [one.spans[name] for one in done]
        seconds = max(ended for _, ended, _ in spans) - min(began for began, _, _ in spans)
        phases[name] = {"count": sum(count for *_, count in spans), "seconds": seconds}
    verified = sum(one.verified for one in done)
    node.tell(phases, verified=verified, to_verify=sum(one.to_verify for one in done), unit="items")


def _take(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _do(does: Callable[[Worker], None], worker: Worker) -> Worker:
    try:
        does(worker)
        worker.gather("end")
    except BaseException:
        # Releases the others from the barrier.
        _barrier.abort()
        raise
    return worker
