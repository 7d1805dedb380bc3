"""`Buffers`: memory for tensors that storage reads into and writes from without a copy."""

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
    """Memory for tensors: page-aligned, in huge pages, in place, and kept for the next tensor.

    Bytes go between such tensors and storage without a copy on the way, and without the page faults
    that fresh memory costs. A tensor gives its memory back when the last view of it is gone.

    Args:
        budget_bytes: How many bytes there may be in all, those kept included.
        lock: Whether the system may never page them out (``mlock``), which ordinary users may have
            of little memory only (``ulimit -l``).

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
        self._native = _native.Stock(budget_bytes, bool(lock))

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any) -> Any:
        """A tensor or array whose content is undefined.

        Args:
            shape: Its sizes.
            dtype: A `torch.dtype` for a tensor; what NumPy takes for an array.

        Raises:
            StorageError: There is no room in the budget, in the system or in what may be locked.
            ValueError: A size is negative.
            TypeError: The type has no plain elements.
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
            # Itself where it can be: views of a view keep alive what that is a view of, not that.
            return flat if len(sizes) == 1 else flat.view(sizes)
        kind = np.dtype(dtype)
        if kind.hasobject or kind.itemsize == 0:
            raise TypeError(f"dtype={dtype!r}: its elements have no bytes of their own")
        held = self._take(count * kind.itemsize)
        elements = np.frombuffer(held, kind, count)  # type: ignore[call-overload]
        return elements.reshape(sizes)

    def _take(self, nbytes: int) -> _native.HostBuffer:
        # What is beyond any address is refused like what is beyond the budget.
        return self._native.take(min(nbytes, sys.maxsize))

    def empty_like(self, tensor: Any) -> Any:
        """A contiguous tensor or array of the shape and type of another.

        Raises:
            StorageError: There is no room in the budget, in the system or in what may be locked.
        """
        return self.empty(tuple(tensor.shape), tensor.dtype)

    def release(self) -> None:
        """Gives what no tensor has back to the system."""
        self._native.release()

    @property
    def taken_bytes(self) -> int:
        """Bytes that tensors have, in whole pages."""
        return self._native.taken_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for the next ones."""
        return self._native.free_bytes


def _sizes(shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    """As numbers of Python, whose product no number of bits limits."""
    try:
        return (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        return tuple(map(operator.index, shape))  # type: ignore[arg-type]
