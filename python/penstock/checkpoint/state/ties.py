"""Finds equal memories and views into others, so that each byte is stored once.

Two live objects at the same address share memory, whatever created them, so addresses decide, not
storages: a NumPy array and the tensor made from it are tied as well. Recognized are:

* the same elements (address, dtype, shape and strides) under several names;
* a window of any shape and strides inside a *contiguous* memory of the same dtype that is stored as
    well, such as ``w.t()`` or ``w[2:5]`` beside ``w``.

Memories that overlap in another way are stored separately and restored as independent, which a save
reports (`apart`). Empty memories, whose address means nothing, are never tied.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from penstock.tensors.memory import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.checkpoint.state.tree.references import Window
    from penstock.tensors.memory import Memory

_PAIRS_MAX = 20_000
"""Largest number of pairs of memories compared for common elements: some milliseconds."""

_SOLVER_WORK_MAX = 10_000

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Array: TypeAlias = np.ndarray[tuple[int], np.dtype[_Scalar]]


def find(memories: Sequence[Memory]) -> dict[int, tuple[int, Window | None]]:
    """Maps every memory that need not be stored to a stored one, and the part of it.

    Returns:
        Index of a memory -> (index of a stored one, None for all of it or a window into it).

    Example:
        >>> import numpy as np
        >>> from penstock.tensors.memory import of_array
        >>> w = np.zeros((2, 3))
        >>> find([of_array(w, "w"), of_array(w.T, "w_t")])
        {1: (0, ((3, 2), (1, 3), 0))}
    """
    tied: dict[int, tuple[int, Window | None]] = {}
    for run in overlaps(memories):
        _find_in_run(memories, run, tied)
    return tied


def apart(memories: Sequence[Memory], tied: Collection[int]) -> list[tuple[int, int]]:
    """Returns memories with common elements that are nevertheless stored separately.

    ``tied`` is of `find`: indices of the memories that are not stored.

    Returns:
        Pairs of indices, one for each such memory; a bounded number of them.

    Example:
        >>> import numpy as np
        >>> from penstock.tensors.memory import of_array
        >>> w = np.zeros(9)
        >>> parts = [of_array(w[:6], "a"), of_array(w[3:], "b"), of_array(w[::-4], "c")]
        >>> apart(parts, find(parts))
        [(0, 1), (1, 2)]
    """
    stored = [index for index in range(len(memories)) if index not in tied]
    found: list[tuple[int, int]] = []
    looked = 0
    for run in overlaps([memories[index] for index in stored]):
        members = sorted(stored[member] for member in run)
        for at, index in enumerate(members):
            for other in members[at + 1 :]:
                looked += 1
                if looked > _PAIRS_MAX:
                    return found
                if share_memory(memories[index], memories[other]):
                    found.append((index, other))
                    break
    return found


def overlaps(memories: Sequence[Memory]) -> list[list[int]]:
    """Returns runs of memories with overlapping spans, by address; single ones are omitted."""
    low = np.array([memory.low for memory in memories], np.uint64)
    high = np.array([memory.high for memory in memories], np.uint64)
    device = np.array([memory.device for memory in memories])
    runs: list[list[int]] = []
    for name in {memory.device for memory in memories}:
        indices = np.flatnonzero((device == name) & (high > low))
        runs += _overlaps_on_device(indices, low[indices], high[indices])
    return runs


def _overlaps_on_device(
    indices: _Array[np.intp], low: _Array[np.uint64], high: _Array[np.uint64]
) -> list[list[int]]:
    order = np.argsort(low, kind="stable")
    reached = np.maximum.accumulate(high[order])
    joins = np.zeros(len(order), bool)
    joins[1:] = low[order][1:] < reached[:-1]
    # Almost every memory of a real state is separate: only the others are examined further.
    is_shared = joins.copy()
    is_shared[:-1] |= joins[1:]
    run_of = np.cumsum(~joins)[is_shared]
    members = zip(run_of.tolist(), indices[order][is_shared].tolist(), strict=True)
    return [[index for _, index in run] for _, run in groupby(members, key=lambda pair: pair[0])]


def _find_in_run(
    memories: Sequence[Memory], run: list[int], tied: dict[int, tuple[int, Window | None]]
) -> None:
    """Makes one pass by address, larger first: a container precedes its windows."""
    run.sort(
        key=lambda index: (
            memories[index].low,
            -memories[index].high,
            memories[index].strides is not None,
            index,
        )
    )
    same: dict[tuple[object, ...], tuple[int, Window | None]] = {}
    # The stored contiguous memory with the furthest end: if any contains the next memory, this one
    # does.
    furthest: dict[str, int] = {}
    for index in run:
        memory = memories[index]
        identity = (memory.address, memory.dtype, memory.shape, memory.strides)
        if identity in same:
            tied[index] = same[identity]
            continue
        container = furthest.get(memory.dtype)
        window = None if container is None else _window(memory, memories[container])
        if container is not None and window is not None:
            same[identity] = tied[index] = (container, window)
            continue
        same[identity] = (index, None)
        reaches_further = container is None or memory.high > memories[container].high
        if memory.strides is None and reaches_further:
            furthest[memory.dtype] = index


def _window(memory: Memory, container: Memory) -> Window | None:
    """Returns a memory as a window of a contiguous one that starts no later; None if it is none."""
    item_bytes = memory.item_bytes
    strides = memory.strides
    if strides is None:
        strides = contiguous_strides(memory.shape, item_bytes)
    offset_bytes = memory.address - container.low
    if memory.high > container.high or offset_bytes % item_bytes:
        return None
    if any(stride % item_bytes for stride in strides):
        return None
    return (
        memory.shape,
        tuple(stride // item_bytes for stride in strides),
        offset_bytes // item_bytes,
    )


def share_memory(one: Memory, other: Memory) -> bool:
    """Whether two memories have a byte in common."""
    if one.low >= other.high or other.low >= one.high:
        return False
    if one.strides is None and other.strides is None:
        return True
    # NumPy's own stub allows only two of the documented numbers.
    work: Any = _SOLVER_WORK_MAX
    try:
        return np.shares_memory(_elements(one), _elements(other), max_work=work)
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Presents addresses of elements to NumPy's overlap solver; the elements are never read."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "data": (memory.address, True),
            "typestr": f"|V{memory.item_bytes}",
            "shape": memory.shape,
            "strides": memory.strides,
            "version": 3,
        }


def _elements(memory: Memory) -> np.ndarray[Any, Any]:
    return np.asarray(_Addresses(memory))
