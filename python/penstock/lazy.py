"""What keeps a lazy save whole: copies of what may change unnoticed, and counts of other changes.

PyTorch counts how often each tensor was changed in place. An array has no such count, nor has a
tensor of inference mode, and memory that one of these shares with a counted tensor may change
behind its back: all of that is copied at the call. Of the rest the counts are noted; objects that
share memory may have counts of their own, so those of all are.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.memory import contiguous_strides, of_array, of_tensor, to_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock import _native
    from penstock._native import _TensorSource
    from penstock.flatten import Flattened

_COPIED_BYTES_MAX = 64 << 10
"""What the native module copies by itself, as long as there is not too much of it."""

_KEPT_BYTES_MAX = 64 << 20
"""Of copies outside of the memory for staging, so that this stays a bound."""


class LazyJob(NamedTuple):
    """What a lazy save begins with.

    Attributes:
        job: The write.
        is_lazy: Whether it is one: with many arrays all is copied first.
        counted: Names and tensors whose counts have to stay as they are until all is copied.
    """

    job: _native.Job
    is_lazy: bool
    counted: list[tuple[str, Any]]


def make_job(flat: Flattened, make: Callable[[list[_TensorSource], bool], _native.Job]) -> LazyJob:
    """Makes the job of a lazy save.

    Args:
        flat: The state, taken apart, with its overlaps.
        make: Makes a job of sources, lazy or not.
    """
    sources = [
        _held(source) if _nbytes(source) > _COPIED_BYTES_MAX else source for source in flat.tensors
    ]
    job = make(sources, True)
    copied = set(job.copied())
    left = [
        index for index, source in enumerate(sources) if index not in copied and _nbytes(source) > 0
    ]
    uncounted = _uncounted(flat)
    kept = [index for index in left if index in uncounted]
    if sum(_nbytes(sources[index]) for index in kept) > _KEPT_BYTES_MAX:
        return LazyJob(make(flat.tensors, False), False, [])
    if kept or any(_nbytes(sources[index]) <= _COPIED_BYTES_MAX for index in left):
        for index in left:
            change = _copy_of if index in uncounted else _held
            sources[index] = change(flat.tensors[index])
        job = make(sources, True)
    counted = {*left}.difference(kept)
    return LazyJob(job, True, list(_counted(flat, sources, counted)))


def _uncounted(flat: Flattened) -> set[int]:
    """Sources that may change unnoticed."""
    found = {index for index, source in enumerate(flat.tensors) if _may_hide(source[6])}
    for overlap in flat.overlaps:
        if any(map(_may_hide, overlap.values)):
            found.update(overlap.sources)
    return found


def _may_hide(owner: Any) -> bool:
    """Whether changes of it are not counted."""
    # Of a `DTensor`, what it holds and itself.
    if type(owner) is tuple:
        return any(map(_may_hide, owner))
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(owner, torch.Tensor):
        return True
    return bool(owner.is_inference())


def _counted(
    flat: Flattened, sources: list[_TensorSource], indices: set[int]
) -> Iterator[tuple[str, Any]]:
    for index in sorted(indices):
        name, owner = sources[index][0], sources[index][6]
        for one in owner if type(owner) is tuple else (owner,):
            yield name, one
    for overlap in flat.overlaps:
        inside = indices.intersection(overlap.sources)
        if inside:
            name = flat.tensors[min(inside)][0]
            yield from ((name, value) for value in overlap.values)


def _nbytes(source: _TensorSource) -> int:
    return math.prod(source[2]) * source[5]


def _held(source: _TensorSource) -> _TensorSource:
    """A source that holds its memory whatever becomes of the tensor: ``tensor.data = …``."""
    owner: Any = source[6]
    if isinstance(owner, np.ndarray):
        return source
    held = (owner[0].detach(), *owner[1:]) if type(owner) is tuple else owner.detach()
    return (*source[:6], held, source[7])


def _copy_of(source: _TensorSource) -> _TensorSource:
    name, _, shape, address, strides, item_bytes, _, box = source
    owner: Any = source[6]
    if isinstance(owner, np.ndarray):
        return to_source(of_array(owner.copy(order="C"), name), name)
    local = owner[0] if type(owner) is tuple else owner
    at = local.storage_offset() + (address - local.data_ptr()) // item_bytes
    steps = [stride // item_bytes for stride in strides or contiguous_strides(shape, item_bytes)]
    part = local.as_strided(shape, steps, at)
    return to_source(of_tensor(part.clone(), name), name, box)
