"""Saves and loads of `megatron.core.dist_checkpointing`, by its own format or by Penstock."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as theirs
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from penstock.integrations.megatron import LoadStrategy, SaveStrategy

if TYPE_CHECKING:
    from pathlib import Path

PENSTOCK, TORCH_DIST = "penstock", "torch_dist"
LIBRARIES = (PENSTOCK, TORCH_DIST)

_SHARD = re.compile(r"^(?:shard-|__)0*(\d+)[-_]")
"""Names of the files of a rank, in both formats."""


class Checkpoints:
    """How a rank saves and loads.

    Args:
        library: `PENSTOCK` or `TORCH_DIST`.
        is_parallel: Whether replicas share the writing, as Megatron-LM does by default.
    """

    def __init__(self, library: str, *, is_parallel: bool) -> None:
        # A save of Megatron-Core's own starts processes, which a daemon must not.
        process: Any = multiprocessing.current_process()
        process._config["daemon"] = False
        is_ours = library == PENSTOCK
        own = theirs.TorchDistSaveShardedStrategy
        self.strategy: Any = SaveStrategy() if is_ours else own("torch_dist", 1)
        self._loading: Any = LoadStrategy() if is_ours else theirs.TorchDistLoadShardedStrategy()
        if is_parallel:
            self.strategy = FullyParallelSaveStrategyWrapper(self.strategy)
        self._calls = async_utils.AsyncCallsQueue()

    def save(self, state: dict[str, Any], directory: str) -> None:
        """Saves, with the caller waiting."""
        _make(directory)
        dist_checkpointing.save(state, directory, self.strategy)

    def begin(self, state: dict[str, Any], directory: str) -> None:
        """Saves in the background."""
        _make(directory)
        parameters = inspect.signature(dist_checkpointing.save).parameters
        further = {"async_strategy": "mcore"} if "async_strategy" in parameters else {}
        request = dist_checkpointing.save(
            state, directory, self.strategy, async_sharded_save=True, **further
        )
        self._calls.schedule_async_request(request)

    def finish(self, *, is_blocking: bool) -> bool:
        """Commits a save that has ended; whether there was one."""
        return bool(self._calls.maybe_finalize_async_calls(blocking=is_blocking))

    def load(self, into: dict[str, Any], directory: str) -> dict[str, Any]:
        """Loads."""
        return dict(dist_checkpointing.load(into, directory, self._loading))

    def close(self) -> None:
        """Ends the processes that Megatron-Core has started."""
        self._calls.close()
        filesystem_async._results_queue = None


def _make(directory: str) -> None:
    if dist.get_rank() == 0:
        os.makedirs(directory, exist_ok=True)
    dist.barrier()


def bytes_by_rank(directory: Path) -> dict[int, int]:
    """The bytes that each rank has written, of the ranks that have written tensors."""
    found: dict[int, int] = {}
    for path in directory.iterdir():
        if rank := _SHARD.match(path.name):
            found[int(rank[1])] = found.get(int(rank[1]), 0) + path.stat().st_size
    return found
