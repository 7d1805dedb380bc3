"""Compares the tensors of a save with those of the one before, whatever Megatron-Core assumes.

`FullyParallelSaveStrategyWrapper` decides which rank stores which tensor. With
``--ckpt-assume-constant-structure`` it keeps the decision of the first save, and of a tensor that
has come since no rank would store anything.
"""

from __future__ import annotations

from functools import wraps
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_DIGEST = "_penstock_structure"
_COMPARES = "_penstock_compares"


def compare() -> None:
    """Makes the wrapper compare, also around a strategy that is used without `enable`."""
    apply = FullyParallelSaveStrategyWrapper.apply_saving_parallelization
    FullyParallelSaveStrategyWrapper.apply_saving_parallelization = comparing(apply)


def comparing(apply: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Makes the wrapper forget its decision if any rank has other tensors than then."""
    if hasattr(apply, _COMPARES):
        return apply

    @wraps(apply)
    def apply_saving_parallelization(self: Any, sharded_state_dict: Any) -> None:
        if self.do_cache_distribution:
            found = digest(sharded_state_dict)
            changed: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(changed, getattr(self, _DIGEST, None) != found)
            if any(changed):
                self.cached_distribution = None
            setattr(self, _DIGEST, found)
        apply(self, sharded_state_dict)

    setattr(apply_saving_parallelization, _COMPARES, True)
    return apply_saving_parallelization


def digest(sharded_state_dict: Any) -> bytes:
    """A digest of the names, types and places of tensors and objects."""
    found = blake2b(digest_size=16)
    for one in nested_values(sharded_state_dict):
        if isinstance(one, ShardedTensor):
            held = getattr(one, "flattened_range", None)
            places = (tuple(one.local_shape), tuple(one.global_shape), tuple(one.global_offset))
            kept = (one.dtype, places, held, one.replica_id)
            found.update(f"{one.key}\0{kept}\n".encode())
        elif isinstance(one, ShardedObject):
            found.update(f"{one.unique_key}\0{one.replica_id}\n".encode())
    return found.digest()
