"""The parameters that all measurements share: places, sizes, deadline, results."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.common.machine import gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock_bench.suites.gpu.accelerators import Accelerator
    from penstock_bench.suites.gpu.results import Results

_BLOCK_BYTES = 4 << 20
"""The size of a copy of saves and loads."""


class OverError(Exception):
    """The time of the run is over."""


@dataclass
class Run:
    """One run.

    A group of measurements has to be over at the deadline, on the monotonic clock. Results are
    saved after each round: a run that is broken off leaves its rounds. A small run only shows
    that it runs.
    """

    device: Accelerator
    results: Results
    size_bytes: int
    rounds: int
    memory: Path
    disk: Path
    deadline: float
    is_small: bool
    progress: Callable[[str], None]
    save: Callable[[], None]

    def end_group(self, deadline: float) -> None:
        """Says when the measurements that come have to be over."""
        self.deadline = deadline

    def is_over(self) -> bool:
        """Whether there is no more time."""
        return time.monotonic() >= self.deadline

    def left(self) -> float:
        """Seconds until the group has to be over.

        Raises:
            OverError: It has.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise OverError
        return left

    def each_round(self, what: str) -> Iterator[int]:
        """Yields the numbers of the rounds until the deadline.

        Raises:
            OverError: The time is over before the first.
        """
        for number in range(self.rounds):
            if number and self.is_over():
                return
            self.left()
            self.progress(f"{what}, round {number + 1}")
            yield number
            self.save()

    def link(self, way: gpus.Way) -> float:
        """GB/s of the GPU's link in a direction, now."""
        found = gpus.link(
            0,
            block_bytes=[_BLOCK_BYTES],
            window_bytes=(16 if self.is_small else 256) << 20,
            seconds=0.01 if self.is_small else 0.2,
            rounds=1,
            ways=(way,),
        )
        (rate,) = found.of(way).gb_per_second
        name = {"to_host": "L from the GPU, GB/s", "to_device": "L to the GPU, GB/s"}[way]
        self.results.figure(name, rate)
        return rate


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def remove(path: Path) -> None:
    """Deletes a directory, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
