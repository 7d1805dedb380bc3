"""Marks on states and leaves: arrays in pieces, per-rank values, immutable states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """An array or a tensor in pieces, which is loaded as one.

    The pieces are written from their own memory; they are not assembled first. Ranks of
    `torch.distributed` that save together each give their pieces of a tensor, under one name; a
    rank without a piece of it leaves it out. Arrays in pieces are saved by one process.

    Attributes:
        shape: Sizes of the whole, none of them 0 for an array.
        dtype: The element type: NumPy's for an array, PyTorch's for a tensor.
        pieces: Index of the first element, and the elements, of each piece. The pieces of all ranks
            that save the whole cover it without overlaps.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any] | torch.dtype
    pieces: Sequence[tuple[tuple[int, ...], np.ndarray[Any, Any] | torch.Tensor]]

    @property
    def is_array(self) -> bool:
        """Whether it is loaded as an array rather than a tensor."""
        # PyTorch need not be installed.
        return type(self.dtype).__module__ != "torch"


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """Marks a state as immutable, with memory that stays valid while it is referenced.

    Arrays of JAX are immutable. A lazy save of such a state copies nothing at the call and watches
    no memory.

    Attributes:
        value: The state.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value that is stored for each rank when many ranks save together.

    The mark is useful for plain tensors only: other plain values, arrays and byte strings are
    stored for each rank in any case, as are tensors that differ between ranks; see `penstock.save`.
    The mark saves thousands of ranks the comparison of such tensors. A load returns the value
    without the mark. A target in ``load(into=…)`` may have the mark or not.

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
