"""What a lazy save copies at the call, and what it holds on to until it is copied.

The rest may change before it is copied, whoever changes it: the native module has the kernel watch
its memory, and the save fails if anybody wrote to it in time. So what is copied here is copied for
convenience. A guard knows when an optimizer steps, and nobody knows when an array changes.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from penstock.checkpoint.state.flattened import Flattened
    from penstock.tensors.memory import TensorSource

_SMALL_BYTES_MAX = 64 << 10
_SMALL_TOTAL_BYTES_MAX = 64 << 20
"""What the native module copies by itself: tensors up to this size, up to so much in all."""


class LazySources(NamedTuple):
    """What the job of a lazy save is made of.

    Attributes:
        sources: The tensors, each with memory that stays.
        at_once: Indices of those to copy at the call, whatever their size.
    """

    sources: list[TensorSource]
    at_once: list[int]


def lazy_sources(flat: Flattened) -> LazySources:
    """The tensors of a state, for a lazy save.

    Args:
        flat: The state, taken apart, with its overlaps.
    """
    sizes = [_nbytes(source) for source in flat.tensors]
    small_bytes = sum(size for size in sizes if size <= _SMALL_BYTES_MAX)
    # What is copied by the call itself need not be held.
    held_from = 0 if small_bytes > _SMALL_TOTAL_BYTES_MAX else _SMALL_BYTES_MAX
    sources = [
        # A device copies when its turn comes, whatever the size.
        _held(source) if size > held_from or source[8] is not None else source
        for source, size in zip(flat.tensors, sizes, strict=True)
    ]
    return LazySources(sources, sorted(_unguarded(flat)))


def _unguarded(flat: Flattened) -> set[int]:
    """Sources that change while no optimizer steps, or unseen by the kernel."""
    found = {index for index, source in enumerate(flat.tensors) if _is_unguarded(source[6])}
    for overlap in flat.overlaps:
        if any(map(_is_unguarded, overlap.values)):
            found.update(overlap.sources)
    return found


def _is_unguarded(owner: Any) -> bool:
    # Of a `DTensor`, what it holds and itself.
    if type(owner) is tuple:
        return any(map(_is_unguarded, owner))
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(owner, torch.Tensor):
        return True
    # Into pinned memory devices write, past the page tables of this process.
    return bool(owner.is_inference() or (owner.is_cpu and owner.is_pinned()))


def _nbytes(source: TensorSource) -> int:
    return math.prod(source[2]) * source[5]


def _held(source: TensorSource) -> TensorSource:
    """A source that holds its memory whatever becomes of the tensor: ``tensor.data = …``."""
    owner: Any = source[6]
    if isinstance(owner, np.ndarray):
        return source
    held = (owner[0].detach(), *owner[1:]) if type(owner) is tuple else owner.detach()
    return (*source[:6], held, *source[7:])
