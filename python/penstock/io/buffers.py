"""`Buffers`: memory for tensors that storage reads into and writes from without copies."""

from __future__ import annotations

import math
import operator
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import _native
from penstock.common.option_kinds import Number
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import SupportsIndex

_BUDGET = Number(1, (1 << 63) - 1, "bytes", is_open=False)


class Buffers:
    """Page-aligned memory in huge pages for tensors, reused from one tensor to the next.

    Storage reads into such tensors and writes from them without intermediate copies and without the
    page faults of fresh memory. The memory of a tensor is returned when its last view is gone.

    Args:
        budget_bytes: Upper bound of all allocated bytes, those kept for reuse included.
        lock: Whether the pages are locked in memory (``mlock``). Ordinary users may lock little
            memory (``ulimit -l``).

    Raises:
        ValueError: The budget is out of range.

    Example:
        >>> import numpy as np, penstock.offload, tempfile
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> buffers = penstock.offload.Buffers(64 << 20)
        >>> weights = buffers.empty((1024, 1024), np.float32)
        >>> weights[:] = 1
        >>> with penstock.offload.TensorIO() as io:
        ...     io.write(weights, path).result().staged_bytes
        0
    """

    def __init__(self, budget_bytes: int, *, lock: bool = False) -> None:
        _BUDGET.check("budget_bytes", budget_bytes)
        self._native = _native.CachingHostAllocator(budget_bytes, bool(lock))

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any) -> Any:
        """Returns a tensor or array with undefined contents.

        Args:
            shape: The sizes.
            dtype: A `torch.dtype` for a tensor; any dtype that NumPy accepts for an array.

        Raises:
            StorageError: The budget, the system's memory or the limit of locked memory is
                exhausted.
            ValueError: A size is negative.
            TypeError: The dtype has no plain elements.
        """
        sizes = _sizes(shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape={shape!r}: no size may be negative")
        count = math.prod(sizes)
        if hasattr(dtype, "is_floating_point"):
            torch = dtypes.import_torch()
            if count == 0:
                return torch.empty(sizes, dtype=dtype, device="cpu")
            held = self._take(count * dtype.itemsize)
            flat = torch.frombuffer(held, dtype=dtype)
            # The flat tensor is returned itself if possible: a view keeps alive the base of its
            # base, not the flat tensor.
            return flat if len(sizes) == 1 else flat.view(sizes)
        kind = np.dtype(dtype)
        if kind.hasobject or kind.itemsize == 0:
            raise TypeError(f"dtype={dtype!r}: its elements have no bytes of their own")
        held = self._take(count * kind.itemsize)
        elements = np.frombuffer(held, kind, count)  # type: ignore[call-overload]
        return elements.reshape(sizes)

    def _take(self, nbytes: int) -> _native.HostBuffer:
        # A size beyond the address range is refused like one beyond the budget.
        return self._native.take(min(nbytes, sys.maxsize))

    def empty_like(self, tensor: Any) -> Any:
        """Returns a contiguous tensor or array with the shape and dtype of another.

        Raises:
            StorageError: The budget, the system's memory or the limit of locked memory is
                exhausted.
        """
        return self.empty(tuple(tensor.shape), tensor.dtype)

    def release(self) -> None:
        """Returns unused memory to the system."""
        self._native.release()

    @property
    def used_bytes(self) -> int:
        """Bytes in use by tensors, in whole pages."""
        return self._native.taken_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes kept for later tensors."""
        return self._native.free_bytes


def _sizes(shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    """Converts to Python's integers, whose product does not overflow."""
    try:
        return (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        return tuple(map(operator.index, shape))  # type: ignore[arg-type]
