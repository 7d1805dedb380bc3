"""One training run with one way to save, in a process of its own."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import memory
from penstock_bench.harness.measure import measured, memory_bytes
from penstock_bench.harness.storage import files_below, sync_tree
from penstock_bench.suites.training.savers import NOTHING, SAVERS, Saver

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

# A float32 parameter and Adam's two moments of it.
_BYTES_PER_PARAMETER = 12
_WARM_STEPS = 3
_COPIES = 5


@dataclass(frozen=True)
class Task:
    """A training, and its way to save.

    The size is that of parameters and moments together, about. One more save comes before those
    that count, and so many steps after each.
    """

    saver: str
    size_bytes: int
    width: int
    batch: int
    saves: int
    every: int
    directory: str


class Training:
    """A deep perceptron: much state, little to compute."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        layer_bytes = _BYTES_PER_PARAMETER * task.width * (task.width + 1)
        layers = max(1, round(task.size_bytes / layer_bytes))
        self.model = nn.Sequential(*(_Layer(task.width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step_number = 0
        self.loss = torch.zeros(())
        self._size = (task.batch, task.width)

    def step(self, saver: Saver) -> float:
        """One step; returns for how long it waited for a save."""
        self.step_number += 1
        generator = torch.Generator().manual_seed(self.step_number)
        batch = torch.randn(self._size, generator=generator)
        self.loss = (self.model(batch) - batch.flip(1)).square().mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss)
        waited_before = saver.waited_seconds()
        began = time.perf_counter()
        with saver.change():
            waited_seconds = time.perf_counter() - began
            self.optimizer.step()
        return waited_seconds + saver.waited_seconds() - waited_before

    def state(self) -> dict[str, Any]:
        """The state to save."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step_number,
        }

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state."""
        moments = [part for own in self.optimizer.state.values() for part in own.values()]
        return [*self.model.state_dict().values(), *moments]


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(x))


@dataclass
class Timing:
    """Some saves and the steps after each.

    Attributes:
        seconds: All of it, until the last save is durable.
        call_seconds: Of each save: how long its call took, with whatever it waited for.
        wait_seconds: Of each save: how long the steps after it waited for it.
        durable_seconds: Of each save: from the call until its files and directories are synced.
    """

    seconds: float = 0.0
    call_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    durable_seconds: list[float] = field(default_factory=list)


def run(task: Task) -> dict[str, Any]:
    """Trains, first with one save, which finds memory cold, then with those that count."""
    root = Path(task.directory)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    training = Training(task)
    nothing = SAVERS[NOTHING].kind(root, training.optimizer)
    for _ in range(_WARM_STEPS):
        training.step(nothing)
    state_bytes = sum(tensor.nbytes for tensor in training.tensors())
    copy_seconds = time_copy(training.tensors())
    saver = SAVERS[task.saver].kind(root, training.optimizer)
    children = _processes()
    quiesce(root)
    # As `penstock_bench.harness.memory.touch` says: what the host has to give back is given back
    # before.
    memory.touch(2 * state_bytes)
    with measured() as cost:
        first = train(training, saver, 1, task.every)
        quiesce(root)
        memory.touch(2 * state_bytes)
        timing = train(training, saver, task.saves, task.every)
    children_bytes = _growth(children)
    saver.close()
    if task.saver != NOTHING:
        require_written(root, task.saves + 1, state_bytes)
    return {
        "nbytes": state_bytes,
        "copy_seconds": copy_seconds,
        "extra_bytes": cost.peak_growth_bytes + children_bytes,
        "first": asdict(first),
        "timing": asdict(timing),
        "steps": task.saves * task.every,
        "loss": float(training.loss).hex(),
    }


def train(training: Training, saver: Saver, saves: int, every: int) -> Timing:
    """Saves and trains, and waits until the last save is durable."""
    timing = Timing()
    saving: _Saving | None = None
    with ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        for _ in range(saves):
            called = time.perf_counter()
            # Nobody begins a save before the last one is durable.
            if saving is not None:
                timing.durable_seconds.append(saving.wait())
            saving = _Saving(saver, training, pool)
            timing.call_seconds.append(time.perf_counter() - called)
            timing.wait_seconds.append(sum(training.step(saver) for _ in range(every)))
        if saving is not None:
            timing.durable_seconds.append(saving.wait())
        timing.seconds = time.perf_counter() - began
    return timing


class _Saving:
    """One save, seen through until it is durable."""

    def __init__(self, saver: Saver, training: Training, pool: ThreadPoolExecutor) -> None:
        self._path = saver.path(training.step_number)
        self._began = time.perf_counter()
        wait = saver.save(training.step_number, training.state())
        self._end: Future[float] | None = None
        self._seconds = 0.0
        if wait is None:
            self._seconds = self._see_through()
        else:
            self._end = pool.submit(self._see_through, wait)

    def _see_through(self, wait: Callable[[], object] | None = None) -> float:
        if wait is not None:
            wait()
        if self._path.exists():
            sync_tree(self._path)
        return time.perf_counter() - self._began

    def wait(self) -> float:
        """Waits until it is durable; returns how long that took from the call."""
        return self._seconds if self._end is None else self._end.result()


def require_written(root: Path, saves: int, state_bytes: int) -> None:
    """Refuses a run that has left less than a state for each of its saves."""
    found = [sum(file.stat().st_size for file in files_below(path)) for path in root.glob("step-*")]
    if len(found) != saves or min(found) < state_bytes:
        raise AssertionError(f"{saves} saves of {state_bytes} bytes each have left {found} bytes")


def time_copy(tensors: list[torch.Tensor]) -> float:
    """Seconds to copy all tensors into memory that is there: the least that staging can take."""
    targets = [torch.empty_like(tensor).fill_(1) for tensor in tensors]
    found = []
    for _ in range(_COPIES):
        began = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _processes() -> dict[int, dict[str, int]]:
    """Resident memory of the processes that this one has started, in bytes."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            sizes = memory_bytes(child.pid)
            # A process that has ended and was not waited for has no memory.
            if "VmHWM" in sizes:
                found[child.pid] = sizes
    return found


def _growth(before: dict[int, dict[str, int]]) -> int:
    """By how much other processes grew at their peaks: without what is mapped or shared with us."""
    return sum(
        max(
            0,
            sizes["VmHWM"]
            - sizes["RssShmem"]
            - sizes["RssFile"]
            - before.get(pid, {}).get("RssAnon", 0),
        )
        for pid, sizes in _processes().items()
    )
