"""One rank of a training that is traced, in a process of its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import penstock
from penstock.common import tracing
from penstock_bench.suites.megatron.checkpoints import Checkpoints, bytes_by_rank
from penstock_bench.suites.megatron.gpt import Size, Trainer


@dataclass(frozen=True)
class Task:
    """The work of a rank.

    Attributes:
        library: Who saves; see `checkpoints.LIBRARIES`.
        is_parallel: Whether replicas share the writing.
        is_async: Whether saves run in the background.
        rank: Which rank this is.
        ranks: Number of ranks.
        tensor_parallel: Ranks that share each layer.
        port: TCP port of the job's store.
        size: The size of the model.
        data: Path of the dataset without suffix.
        directory: Where checkpoints are written.
        begin: A checkpoint to go on from; None for a new training.
        trace: The file of the trace; None for no trace.
        steps: Steps of training.
        interval: Steps between two saves.
    """

    library: str
    is_parallel: bool
    is_async: bool
    rank: int
    ranks: int
    tensor_parallel: int
    port: int
    size: Size
    data: str
    directory: str
    begin: str | None
    trace: str | None
    steps: int
    interval: int


def run(task: Task) -> dict[str, Any]:
    """Trains, saves, and returns the times of steps and saves and the bytes of a checkpoint."""
    place = {"RANK": task.rank, "LOCAL_RANK": task.rank, "WORLD_SIZE": task.ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    if task.trace is None:
        return _train(task)
    with penstock.trace(task.trace):
        return _train(task)


def _train(task: Task) -> dict[str, Any]:
    trainer = Trainer(task.rank, task.ranks, task.tensor_parallel, task.port, task.size, task.data)
    checkpoints = Checkpoints(task.library, is_parallel=task.is_parallel)
    if task.begin is not None:
        with tracing.call("stall", "load", task.begin):
            trainer.restore(checkpoints.load(trainer.state(is_loading=True), task.begin))
    saves = _Saves(checkpoints, is_async=task.is_async)
    losses, step_seconds, directory = [], [], ""
    for count in range(1, task.steps + 1):
        began = time.perf_counter()
        losses.append(trainer.step())
        step_seconds.append(time.perf_counter() - began)
        saves.poll()
        if count % task.interval == 0:
            directory = os.path.join(task.directory, f"iter_{trainer.iteration:07}")
            saves.save(trainer.state(), directory)
    saves.end()
    dist.barrier()
    found = bytes_by_rank(Path(directory)) if task.rank == 0 else {}
    checkpoints.close()
    trainer.close()
    return {
        "losses": losses,
        "step_seconds": step_seconds,
        "stall_seconds": saves.stall_seconds,
        "durable_seconds": saves.durable_seconds,
        "begin_seconds": saves.begin_seconds,
        "bytes_by_rank": found,
    }


class _Saves:
    """The saves of a training, and how long it waits for each."""

    def __init__(self, checkpoints: Checkpoints, *, is_async: bool) -> None:
        self._checkpoints, self._is_async = checkpoints, is_async
        self._is_pending = False
        self.begin_seconds: list[float] = []
        self.stall_seconds: list[float] = []
        self.durable_seconds: list[float] = []

    def save(self, state: dict[str, Any], directory: str) -> None:
        """Saves, or begins to after the end of the save before."""
        began = time.perf_counter()
        self.begin_seconds.append(began)
        with tracing.call("stall", "save_async" if self._is_async else "save", directory):
            if self._is_async:
                self._finish(is_blocking=True)
                self._checkpoints.begin(state, directory)
                self._is_pending = True
            else:
                self._checkpoints.save(state, directory)
                self.durable_seconds.append(time.perf_counter() - began)
        self.stall_seconds.append(time.perf_counter() - began)

    def poll(self) -> None:
        """Commits a save that has ended, as a trainer does after each step."""
        self._finish(is_blocking=False)

    def end(self) -> None:
        """Waits for the last save."""
        with tracing.call("stall", "wait"):
            self._finish(is_blocking=True)

    def _finish(self, *, is_blocking: bool) -> None:
        if self._is_pending and self._checkpoints.finish(is_blocking=is_blocking):
            self._is_pending = False
            self.durable_seconds.append(time.perf_counter() - self.begin_seconds[-1])
