"""Processes of one node that do the same phases, each beginning when all are done with the last."""

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
    """One process of the crew.

    Attributes:
        work: The directory of the job.
        local_index: Its number on this node.
        index: Its number among the processes of all nodes.
        count: How many there are on all nodes.
        spans: Of each phase when it began and ended, seconds of this node's clock, and what it did.
        verified: How much was found to be right.
        to_verify: Of how much.
    """

    work: Path
    local_index: int
    index: int
    count: int
    spans: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    verified: int = 0
    to_verify: int = 0

    def phase(self, name: str, does: Callable[[], int]) -> None:
        """Does something when everybody is here, and notes how long it took.

        Args:
            name: The phase; each once, in the same order for all.
            does: Returns how much it did.
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
    """Runs a function in each process and prints what they found together.

    Args:
        work: The directory of the job.
        processes: How many on this node.
        does: What each does: calls of `Worker.phase`.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes, timeout=_TIMEOUT_SECONDS)
    index, nodes = node.place()
    workers = [
        Worker(work, one, index * processes + one, nodes * processes) for one in range(processes)
    ]
    # Each takes one: nobody is done before all have begun.
    with ProcessPoolExecutor(processes, context, _take, (barrier,)) as pool:
        begun = [pool.submit(_do, does, one) for one in workers]
    # That others waited in vain for whoever failed is no news.
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
        # Nobody waits for one who will not come.
        _barrier.abort()
        raise
    return worker
