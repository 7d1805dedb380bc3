"""Ids of rows in the form that the native module takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.tensors import dtypes
from penstock.tensors.native_rows import NativeArray


class RowIds(NamedTuple):
    """Ids of rows.

    Attributes:
        shape: Shape of the caller's ids.
        is_torch: Whether the caller passed a PyTorch tensor.
        dtype: NumPy type of the ids.
        is_signed: Whether the type is signed.
        values: The ids as a contiguous array.
        array: Address, shape, strides, item size and owner of their memory.
    """

    shape: tuple[int, ...]
    is_torch: bool
    dtype: np.dtype[Any]
    is_signed: bool
    values: np.ndarray[Any, Any]
    array: NativeArray


def ids_of(value: Any) -> RowIds:
    """Converts a caller's ids; raises on anything but integers."""
    is_torch = dtypes.is_tensor(value)
    is_array = is_torch or isinstance(value, np.ndarray)
    if is_torch and value.device.type != "cpu":
        raise TypeError(f"ids: a tensor on {value.device}: use one of the host, as of .cpu()")
    found = to_array(value, "ids")
    if found.size == 0 and not is_array:
        # NumPy makes an empty list an array of floats.
        found = found.astype(np.int64)
    if found.dtype.kind in "Of" and not is_array:
        found = _of_python(value, found)
    if found.dtype.kind not in "iu":
        raise TypeError(f"ids: {found.dtype}: use integers")
    shape, dtype = found.shape, found.dtype
    is_copy = not (found.flags.c_contiguous and dtype.isnative)
    if is_copy:
        found = np.ascontiguousarray(found, dtype.newbyteorder("="))
    # `ctypes.data` takes five times as long as the dictionary, and that as long as the rest here.
    if is_torch and found.size and not is_copy:
        address: int = value.data_ptr()
    else:
        address = found.__array_interface__["data"][0]
    array = NativeArray(address, (found.size,), None, found.itemsize, found)
    return RowIds(shape, is_torch, dtype, dtype.kind == "i", found, array)


def to_array(value: Any, name: str) -> np.ndarray[Any, Any]:
    """A caller's numbers (a tensor of the host, an array or a sequence) as an array."""
    try:
        return _array_of(value) if dtypes.is_tensor(value) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        kind = f"{type(value).__name__} of parts of several lengths"
        if dtypes.is_tensor(value):
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            kind = f"{layout} tensor of {value.dtype}"
        raise TypeError(f"{name}: a {kind}: use a plain tensor or array of integers") from None


def _array_of(value: Any) -> Any:
    """A tensor of the host as an array; PyTorch refuses those that need a gradient."""
    return (value.detach() if value.requires_grad else value).numpy()


def _of_python(value: Any, found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Integers that NumPy took for objects or floats, as ``uint64``; raises on ids out of range."""
    objects = np.asarray(value, dtype=object)
    if not objects.size or not all(type(one) is int for one in objects.flat):
        return found
    for position, one in enumerate(objects.flat):
        if not 0 <= one < 1 << 64:
            raise IndexError(f"ids[{position}] is {one}: no table has such a row")
    return objects.astype(np.uint64)
