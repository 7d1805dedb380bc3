"""Saves and loads a tiny state with a Megatron-Core that is newer than the versions tested."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from penstock.integrations.megatron.fitting import PACKAGE
from penstock.integrations.trial import trial_directory
from penstock.integrations.versions import self_check


def try_out(root: str, save: Any, load: Any) -> None:
    """Saves and loads a tiny state, if Megatron-Core is newer than the versions tested.

    All ranks call it.

    Args:
        root: A directory that all ranks see.
        save: The class of the save strategy.
        load: The class of the load strategy.

    Raises:
        MissingDependencyError: It failed, or another state came back.
    """
    self_check(PACKAGE, lambda: _try_out(root, save, load))


def _try_out(root: str, save: Any, load: Any) -> None:
    with trial_directory(root) as directory:
        dist_checkpointing.save(_state(7.0), directory, save())
        found = dist_checkpointing.load(_state(0.0), directory, load())
    rank = dist.get_rank()
    rows = found.pop("rows")
    if not torch.equal(rows, torch.full((2, 3), 7.0 + rank)) or found != {
        "object": 7.0 + rank,
        "common": 7.0,
    }:
        raise ValueError(f"it came back as {found}, {rows}")


def _state(value: float) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.full((2, 3), value + rank)
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, size)),
        "object": ShardedObject("object", value + rank, (size,), (rank,)),
        "common": value,
    }
