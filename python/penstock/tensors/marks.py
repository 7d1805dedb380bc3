"""Marks on states and leaves: arrays in pieces, values of one rank, states that nobody changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """An array that lies in pieces; it is loaded as one array.

    The pieces are written from where they are: nothing puts them together first.

    Attributes:
        shape: Sizes of the whole array, none of them 0.
        dtype: Type of its elements.
        pieces: Index of the first element of each, and its elements. Those of all who save it are
            the whole array, without overlaps.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: Sequence[tuple[tuple[int, ...], np.ndarray[Any, Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """Marks a whole state of which nothing changes, and whose memory stays while it is referred to.

    Arrays of JAX are like that. A lazy save of such a state copies nothing at the call and has
    nothing watched.

    Attributes:
        value: The state.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value of which each rank has its own, where many ranks save together.

    Only plain tensors may need it. Plain values, arrays and byte strings are kept for each rank in
    any case, and so are tensors that differ; see `penstock.save`. The mark spares thousands of
    ranks finding out that they do. What is loaded is the value itself. In a target of
    ``load(into=…)`` it may be marked as well or not.

    Attributes:
        value: Any state, tensors included.

    Example:
        >>> import penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"sampler": penstock.PerRank([1, 2])})
        >>> penstock.load(path)
        {'sampler': [1, 2]}
    """

    value: Any
