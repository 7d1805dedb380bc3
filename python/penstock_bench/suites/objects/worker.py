"""One operation of one contender, in a process of its own."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import memory
from penstock_bench.harness.measure import measured
from penstock_bench.harness.running import rotated
from penstock_bench.suites.objects.contenders import (
    CONTENDERS,
    COPYING,
    LOCAL,
    MIRRORED,
    SAVE,
    Setting,
    reach,
)
from penstock_bench.suites.objects.server import BUCKET
from penstock_bench.workloads import content, states

if TYPE_CHECKING:
    from penstock_bench.workloads.content import StateSpec


_SETTLE_SECONDS_MAX = 5.0

WARM_UP = "warm-up"
"""Below which the small states are that are saved and loaded first."""


@dataclass(frozen=True)
class Task:
    """One process.

    Without names all tensors are loaded. A small state is saved and loaded before, to warm up.
    """

    contender: str
    setting: Setting
    operation: str
    endpoint: str
    key: str
    size_bytes: int
    cores: tuple[int, ...]
    names: tuple[str, ...] = ()
    is_warmed_up: bool = True


@dataclass(frozen=True)
class StoreTask:
    """A process with stores on the disk.

    So many saves count in each store.
    """

    endpoint: str
    key: str
    directory: str
    size_bytes: int
    cores: tuple[int, ...]
    saves: int


def describe(size_bytes: int) -> StateSpec:
    """The tensors of a training state: of a Llama in bfloat16, and of Adam in float32."""
    whole = states.describe("llama", size_bytes)
    tensors = [one for one in whole.tensors if one.shape]
    return content.StateSpec("tensors", whole.description, tensors)


def run(task: Task) -> dict[str, Any]:
    """Measures the operation; returns fields of `penstock_bench.suites.objects.table.Transfer`."""
    # Before anything asks how many there are.
    os.sched_setaffinity(0, task.cores)
    reach(task.endpoint)
    setting = {**task.setting, "keys": list(task.names)} if task.names else task.setting
    contender = CONTENDERS[task.contender](task.endpoint, task.setting)
    spec, url = describe(task.size_bytes), f"s3://{BUCKET}/{task.key}"
    if task.is_warmed_up:
        _warm_up(contender, f"s3://{BUCKET}/{WARM_UP}/{os.getpid()}")
    contender.setting = setting
    if task.operation == SAVE:
        state = spec.flat()
        memory.touch(spec.nbytes)
        with measured() as cost:
            contender.save(url, state)
        extra_bytes = cost.peak_growth_bytes
    else:
        targets = contender.targets(spec.flat_targets())
        wanted = [one for one in spec.tensors if not task.names or one.name in task.names]
        memory.touch(2 * spec.nbytes)
        with measured() as cost:
            loaded = contender.load(url, targets)
        extra_bytes = cost.peak_growth_bytes - sum(one.nbytes for one in wanted)
        if problem := spec.difference(loaded, task.names):
            raise AssertionError(problem)
    contender.close()
    return {
        "seconds": cost.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "extra_bytes": max(0, extra_bytes),
    }


def run_stores(task: StoreTask) -> dict[str, Any]:
    """Seconds of a save, the median, for each of `STORES`."""
    os.sched_setaffinity(0, task.cores)
    reach(task.endpoint)
    state = describe(task.size_bytes).flat()
    directory = Path(task.directory)
    mirror = penstock.Mirror(f"s3://{BUCKET}/{task.key}")
    plain = penstock.CheckpointStore(directory / LOCAL, keep_last=1)
    mirrored = penstock.CheckpointStore(directory / MIRRORED, keep_last=1, mirror=mirror)
    steps = itertools.count()

    def saved(store: penstock.CheckpointStore) -> float:
        quiesce(directory, seconds_max=_SETTLE_SECONDS_MAX)
        step = next(steps)
        begun = time.perf_counter()
        store.save(step, state)
        return time.perf_counter() - begun

    seconds: dict[str, list[float]] = {LOCAL: [], MIRRORED: [], COPYING: []}
    for number in range(task.saves + 1):
        for place, store in rotated([(LOCAL, plain), (MIRRORED, mirrored)], number):
            seconds[place].append(saved(store))
            mirrored.wait_for_mirror()
    for _ in range(task.saves):
        mirrored.save(next(steps), state)
        seconds[COPYING].append(saved(mirrored))
        mirrored.wait_for_mirror()
    mirrored.close()
    # The first save of a store finds memory and files cold.
    seconds[LOCAL], seconds[MIRRORED] = seconds[LOCAL][1:], seconds[MIRRORED][1:]
    return {place: statistics.median(found) for place, found in seconds.items()}


def _warm_up(contender: Any, url: str) -> None:
    """Saves and loads a megabyte, so that nobody is timed at importing and connecting."""
    toy = describe(1 << 20)
    contender.save(url, toy.flat())
    contender.load(url, contender.targets(toy.flat_targets()))
