"""Chooses the tensors that a lazy save copies at the call, and holds the others' memory.

The other tensors are watched by the kernel until they are copied, and the save fails if one is
written to before. The copies at the call are therefore a convenience: a guard intercepts the steps
of an optimizer, but changes of an array cannot be intercepted.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from penstock.checkpoint.state.flattened import Flattened
    from penstock.tensors.native_rows import TensorSource

_SMALL_BYTES_MAX = 64 << 10
_SMALL_TOTAL_BYTES_MAX = 64 << 20
"""Limits of the copies that the native module makes by itself: per tensor, and in all."""


class LazySources(NamedTuple):
    """The tensors of a lazy save's copy job.

    Attributes:
        sources: The tensors, each with memory that stays valid.
        at_once: Indices of the tensors to copy at the call, of any size.
    """

    sources: list[TensorSource]
    at_once: list[int]


def lazy_sources(flat: Flattened) -> LazySources:
    """Returns the tensors of a state for a lazy save."""
    sizes = [_nbytes(source) for source in flat.tensors]
    small_bytes = sum(size for size in sizes if size <= _SMALL_BYTES_MAX)
    # Tensors copied by the call itself need not be held.
    held_from = 0 if small_bytes > _SMALL_TOTAL_BYTES_MAX else _SMALL_BYTES_MAX
    sources = [
        # A device copies at its turn, whatever the size.
        _held(source) if size > held_from or source.device is not None else source
        for source, size in zip(flat.tensors, sizes, strict=True)
    ]
    return LazySources(sources, sorted(_unguarded(flat)))


def _unguarded(flat: Flattened) -> set[int]:
    """Returns sources that may change without an optimizer's step, or unnoticed by the kernel."""
    found = {index for index, source in enumerate(flat.tensors) if _is_unguarded(source.owner)}
    for overlap in flat.overlaps:
        if any(map(_is_unguarded, overlap.values)):
            found.update(overlap.sources)
    return found


def _is_unguarded(owner: Any) -> bool:
    # The owner of a `DTensor`'s local part is a tuple of the local tensor and the `DTensor`.
    if type(owner) is tuple:
        return any(map(_is_unguarded, owner))
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(owner, torch.Tensor):
        return True
    # Devices write to pinned memory directly, bypassing the page tables of this process.
    return bool(owner.is_inference() or (owner.is_cpu and owner.is_pinned()))


def _nbytes(source: TensorSource) -> int:
    return math.prod(source.shape) * source.item_bytes


def _held(source: TensorSource) -> TensorSource:
    """Returns a source that holds its memory even after ``tensor.data = …``."""
    owner: Any = source.owner
    if isinstance(owner, np.ndarray):
        return source
    held = (owner[0].detach(), *owner[1:]) if type(owner) is tuple else owner.detach()
    return source._replace(owner=held)
