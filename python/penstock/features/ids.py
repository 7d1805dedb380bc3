"""Ids of rows, as the native module takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.tensors import dtypes

if TYPE_CHECKING:
    from penstock._native import _Array


class Ids(NamedTuple):
    """Numbers of rows.

    Attributes:
        shape: Of the array that they came in.
        is_torch: Whether that is a tensor of PyTorch.
        dtype: Their type, as NumPy has it.
        is_signed: Whether they can be negative.
        values: They themselves, contiguous.
        array: Their memory.
    """

    shape: tuple[int, ...]
    is_torch: bool
    dtype: np.dtype[Any]
    is_signed: bool
    values: np.ndarray[Any, Any]
    array: _Array


def ids_of(value: Any) -> Ids:
    """What a caller passes as ids.

    Raises:
        TypeError: They are no integers.
        IndexError: One is too large or too small for any table.
    """
    is_torch = dtypes.is_tensor(value)
    is_array = is_torch or isinstance(value, np.ndarray)
    if is_torch and value.device.type != "cpu":
        raise TypeError(f"ids: a tensor on {value.device}: use one of the host, as of .cpu()")
    found = to_array(value, "ids")
    if found.size == 0 and not is_array:
        # A list of nothing is of floating-point numbers, by itself.
        found = found.astype(np.int64)
    if found.dtype.kind in "Of" and not is_array:
        found = _of_python(value, found)
    if found.dtype.kind not in "iu":
        raise TypeError(f"ids: {found.dtype}: use integers")
    shape, dtype = found.shape, found.dtype
    if not (found.flags.c_contiguous and dtype.isnative):
        found = np.ascontiguousarray(found, dtype.newbyteorder("="))
    # Five times as fast as by `ctypes`.
    address: int = found.__array_interface__["data"][0]
    array = address, (found.size,), None, found.itemsize, found
    return Ids(shape, is_torch, dtype, dtype.kind == "i", found, array)


def to_array(value: Any, name: str) -> np.ndarray[Any, Any]:
    """Numbers of a caller as an array.

    Args:
        value: A tensor of the host, an array or a sequence.
        name: The name of the argument.

    Raises:
        TypeError: NumPy has no array of it.
    """
    try:
        return value.detach().numpy() if dtypes.is_tensor(value) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        kind = f"{type(value).__name__} of parts of several lengths"
        if dtypes.is_tensor(value):
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            kind = f"{layout} tensor of {value.dtype}"
        raise TypeError(f"{name}: a {kind}: use a plain tensor or array of integers") from None


def _of_python(value: Any, found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Integers of Python that NumPy has no type for: too large ones, or takes for other numbers."""
    objects = np.asarray(value, dtype=object)
    if not objects.size or not all(type(one) is int for one in objects.flat):
        return found
    for position, one in enumerate(objects.flat):
        if not 0 <= one < 1 << 64:
            raise IndexError(f"ids[{position}] is {one}: no table has such a row")
    return objects.astype(np.uint64)
