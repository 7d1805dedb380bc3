"""One operation of one contender, in a process of its own.

The order is the same for all: import, save and load a toy state once (so that what a library
imports or starts at its first use is not timed), make the state or the targets, for a load empty
the page cache, measure. What happens between the two marks is the library's call, and for a save
the sync of every file and directory that it wrote.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import memory, storage
from penstock_bench.harness.measure import Cost, measured
from penstock_bench.harness.storage import files_below, sync_tree
from penstock_bench.peers.save_load import CONTENDERS
from penstock_bench.workloads import content, states

if TYPE_CHECKING:
    import torch

    from penstock_bench.peers.checkpoint.base import Writer
    from penstock_bench.workloads.content import StateSpec


@dataclass
class Task:
    """The work of the process."""

    contender: str
    variant: str | None
    operation: str
    state: str
    size_bytes: int
    is_tiny: bool
    directory: str
    is_checked: bool


def run(task: Task) -> dict[str, Any]:
    """Measures the operation; returns the fields of its sample."""
    contender = CONTENDERS[task.contender].make()
    directory = Path(task.directory)
    warm_up(contender, directory.with_name(f"{directory.name}-warm-up"), task.variant)
    spec = states.describe(task.state, task.size_bytes, task.is_tiny)
    if task.operation == "save":
        result = save(contender, directory, spec)
    else:
        result = load(contender, directory, spec, task)
    contender.close()
    return result


def warm_up(contender: Writer, directory: Path, variant: str | None) -> None:
    """Saves and loads a state of a megabyte."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        toy = states.describe("toy", 0)
        contender.save(directory, contender.input(toy))
        sync_tree(directory)
        contender.load(directory, contender.targets(toy), variant)
    finally:
        shutil.rmtree(directory)


def save(contender: Writer, directory: Path, spec: StateSpec) -> dict[str, Any]:
    """Measures a durable save."""
    state = contender.input(spec)
    quiesce(directory.parent)
    memory.touch(memory_to_touch(spec))
    with measured() as cost:
        directory.mkdir()
        detail = contender.save(directory, state)
        saved = time.perf_counter()
        sync_tree(directory)
        sync_seconds = time.perf_counter() - saved
    files = files_below(directory)
    return {
        **cost.times,
        "extra_bytes": cost.peak_growth_bytes,
        "sync_seconds": sync_seconds,
        "disk_bytes": sum(path.stat().st_blocks * 512 for path in files),
        "files": len(files),
        "detail": detail or {},
    }


def load(contender: Writer, directory: Path, spec: StateSpec, task: Task) -> dict[str, Any]:
    """Measures a cold load, and looks at what it gave."""
    targets = contender.targets(spec)
    files = files_below(directory)
    quiesce(directory.parent)
    dropped = storage.drop_everything(files)
    resident_fraction = storage.resident_fraction(files)
    memory.touch(memory_to_touch(spec))
    with measured() as cost:
        state, detail = contender.load(directory, targets, task.variant)
    tensors = dict(content.flatten(state))
    require_own_memory(tensors, directory)
    if task.is_checked and (problem := spec.difference(tensors)):
        raise AssertionError(problem)
    return {
        **cost.times,
        "extra_bytes": max(0, cost.peak_growth_bytes - spec.nbytes),
        "resident_fraction": resident_fraction,
        "dropped": dropped,
        "is_checked": task.is_checked,
        "detail": detail or {},
    }


def save_and_load(
    path: Path, state: Any, spec: StateSpec, options: penstock.Options | None = None
) -> tuple[Cost, Cost]:
    """Measures a durable save by Penstock in this process, and a cold load of the checkpoint."""
    shutil.rmtree(path, ignore_errors=True)
    quiesce(path.parent)
    with measured() as saving:
        penstock.save(path, state, options=options, no_dist=True)
    storage.drop_everything(files_below(path))
    quiesce(path.parent)
    memory.touch(memory_to_touch(spec))
    with measured() as loading:
        loaded = penstock.load(path, options=options)
    del loaded
    shutil.rmtree(path)
    return saving, loading


def memory_to_touch(spec: StateSpec) -> int:
    """Memory that an operation may use beside its state: a copy of it, and an eighth more."""
    return spec.nbytes + spec.nbytes // 8


def require_own_memory(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Refuses a load whose tensors are still to be read from the files when they are used."""
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(directory) in line:
            start, _, end = line.partition(" ")[0].partition("-")
            mapped.append(range(int(start, 16), int(end, 16)))
    for name, tensor in tensors.items():
        if any(tensor.data_ptr() in area for area in mapped):
            raise AssertionError(f"{name} is mapped from the file, not loaded")
