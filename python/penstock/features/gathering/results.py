"""Memory for gathered rows."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import _native
from penstock.errors import MissingDependencyError, StorageError
from penstock.tensors import dtypes
from penstock.tensors.native_rows import TensorTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_KEPT_BYTES = 1 << 30
"""Most memory of dropped results that is kept for reuse."""
_KEPT_FROM_BYTES = 64 << 10
"""Smaller results are left to the allocator: they have no page faults to save."""


class Results:
    """Allocates results, and reuses the memory of dropped ones.

    The memory is page-aligned, as direct reads need it, and reuse saves the page faults of fresh
    memory.
    """

    def __init__(self, dtype: str, item_bytes: int) -> None:
        self._dtype = dtype
        self._item_bytes = item_bytes
        self._torch_kind: tuple[Any, torch.dtype] | None = None
        self._stock = _native.CachingHostAllocator(_KEPT_BYTES, False)

    def empty(self, shape: Sequence[int], *, is_torch: bool) -> Any:
        """A tensor or an array with undefined content."""
        sizes = tuple(shape)
        count = math.prod(sizes)
        nbytes = count * self._item_bytes
        if is_torch:
            torch, kind = self._torch()
            if nbytes < _KEPT_FROM_BYTES:
                return torch.empty(sizes, dtype=kind, device="cpu")
            return torch.frombuffer(self._take(nbytes), dtype=kind, count=count).view(sizes)
        array_kind = self._array_kind()
        if nbytes < _KEPT_FROM_BYTES:
            return np.empty(sizes, array_kind)
        held = self._take(nbytes)
        elements = np.frombuffer(held, array_kind, count)  # type: ignore[call-overload]
        return elements.reshape(sizes)

    def small_gathers(
        self, reader: _native.RowReader, row_shape: Sequence[int], times: _native.FileTimes
    ) -> _native.SmallGathers:
        """Gathers rows by one call into arrays, whose memory is reused, too."""
        kind = None
        # NumPy may have no such type.
        with contextlib.suppress(MissingDependencyError, ValueError):
            kind = self._array_kind()
        return _native.SmallGathers(reader, np.ndarray, kind, row_shape, self._stock, times)

    def add_tensors(self, gathers: _native.SmallGathers) -> None:
        """Gathers rows into tensors, too, if this PyTorch has functions for that."""
        try:
            torch, kind = self._torch()
        except (MissingDependencyError, ValueError):
            # There are no such tensors, but the ids may be in one.
            return
        gathers.add_tensors(torch.Tensor, torch.empty(0, dtype=kind, device="cpu"))

    def _torch(self) -> tuple[Any, torch.dtype]:
        """PyTorch and its name of the elements' type, looked up once."""
        if self._torch_kind is None:
            self._torch_kind = dtypes.import_torch(), dtypes.torch_dtype(self._dtype)
        return self._torch_kind

    def _array_kind(self) -> np.dtype[Any]:
        """The NumPy type of arrays; raises `MissingDependencyError` if NumPy has none."""
        try:
            return dtypes.numpy_dtype(self._dtype)
        except MissingDependencyError:
            if importlib.util.find_spec("torch") is None:
                raise
            raise MissingDependencyError(
                f"NumPy has no {self._dtype}, PyTorch has: pass ids as a tensor, as torch.tensor(…)"
                ", or give device='cpu'",
                name="torch",
            ) from None

    def empty_on(self, shape: Sequence[int], device: torch.device) -> Any:
        """A tensor on a device, with undefined content."""
        kind = dtypes.torch_dtype(self._dtype)
        return dtypes.import_torch().empty(tuple(shape), dtype=kind, device=device)

    def check(self, out: Any, shape: Sequence[int], device: torch.device | None = None) -> None:
        """Raises unless a caller's memory can hold the rows, on the required device, if any."""
        where = "that may be written to"
        if dtypes.is_tensor(out):
            if out.is_nested or out.layout is not dtypes.import_torch().strided:
                layout = "nested" if out.is_nested else str(out.layout).removeprefix("torch.")
                raise ValueError(f"out: a {layout} tensor: needed is a contiguous plain one")
            kind, is_good = dtypes.torch_names().get(out.dtype, (None,))[0], out.is_contiguous()
            is_good = is_good and out.device.type != "meta" and not out.requires_grad
            is_good = is_good and not (out.is_conj() or out.is_neg()) and not _is_cut(out)
            if device is not None and not _is_on(out.device, device):
                is_good, where = False, f"on {device}"
        elif isinstance(out, np.ndarray):
            kind = dtypes.numpy_name(out.dtype)
            is_good = out.flags.c_contiguous and out.flags.writeable
            if device is not None and device.type != "cpu":
                is_good, where = False, f"on {device}"
        else:
            raise TypeError(f"out: {type(out).__name__}: use a tensor or an array")
        if kind != self._dtype or tuple(out.shape) != tuple(shape) or not is_good:
            raise ValueError(
                f"out: {kind} of shape {tuple(out.shape)}: needed is a contiguous {self._dtype} of"
                f" shape {tuple(shape)} in memory {where}"
            )

    def _take(self, nbytes: int) -> _native.HostBuffer:
        # Batches of graphs differ in size: rounding up by an eighth lets the next one reuse this.
        step = max(4096, 1 << max(0, nbytes.bit_length() - 4))
        rounded = -(-nbytes // step) * step
        try:
            return self._stock.take(rounded)
        except StorageError:
            # Callers hold more than the cache may: further results get memory of their own.
            return _native.reserve(nbytes, 0)


def _is_cut(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor's storage on the host was resized to less than it needs."""
    if not tensor.is_cpu or not tensor.numel():
        return False
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return bool(end > tensor.untyped_storage().nbytes())


def _is_on(found: torch.device, wanted: torch.device) -> bool:
    """Whether a device is the requested one, which may be given without an index."""
    return str(wanted) in (found.type, str(found))


def target_of(result: Any) -> TensorTarget:
    """The memory of a result."""
    if isinstance(result, np.ndarray):
        return TensorTarget(result.__array_interface__["data"][0], result.nbytes, result)
    return TensorTarget(result.data_ptr(), result.nbytes, (result, result.untyped_storage()))
