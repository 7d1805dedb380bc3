"""Two tensors, arrays or byte strings, compared element by element, bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK_BYTES = 16 << 20
"""Data looked at in one go; comparing takes a few times as much beside it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a tensor is, apart from its content.

    Attributes:
        dtype: Its element type; with the kind of object where that is no tensor.
        shape: Its dimensions.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two tensors of one kind are apart.

    Attributes:
        elements: How many each has.
        differing: How many differ in at least one bit.
        max_abs_difference: The greatest distance between two of them; None where elements are no
            floating point or complex numbers; nan or inf where one of those comes out.
    """

    elements: int
    differing: int
    max_abs_difference: float | None


def kind(value: Any) -> Kind:
    """The kind of a loaded tensor, array or byte string."""
    if isinstance(value, bytes | bytearray):
        return Kind(type(value).__name__, (len(value),))
    dtype = str(value.dtype).removeprefix("torch.")
    suffix = " (array)" if isinstance(value, np.ndarray) else ""
    return Kind(dtype + suffix, tuple(value.shape))


def difference(a: Any, b: Any) -> Difference:
    """Compares two values of one kind."""
    elements = math.prod(kind(a).shape)
    raw_a, raw_b = _raw(a), _raw(b)
    if not elements or not len(raw_a):
        return Difference(elements, 0, None)
    item_bytes = len(raw_a) // elements
    step = max(1, CHUNK_BYTES // item_bytes)
    differing, max_abs = 0, None
    for begin in range(0, elements, step):
        window = slice(begin * item_bytes, (begin + step) * item_bytes)
        unequal = (raw_a[window] != raw_b[window]).reshape(-1, item_bytes).any(axis=1)
        count = int(unequal.sum())
        if count:
            differing += count
            where = begin + np.flatnonzero(unequal)
            max_abs = _greater(max_abs, _distance(a, b, where))
    return Difference(elements, differing, max_abs)


def _raw(value: Any) -> Bytes:
    """The bytes of all elements, in row-major order; no copy of what is contiguous."""
    if isinstance(value, bytes | bytearray):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    import torch

    raw: Bytes = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def _distance(a: Any, b: Any, where: np.ndarray[Any, Any]) -> float | None:
    """The greatest distance of the elements at these flat indices; None if they have none."""
    if isinstance(a, np.ndarray):
        if a.dtype.kind not in "fc":
            return None
        wide = np.dtype("complex128" if a.dtype.kind == "c" else "float64")
        with np.errstate(invalid="ignore"):
            apart = a.reshape(-1)[where].astype(wide) - b.reshape(-1)[where].astype(wide)
        return float(np.abs(apart).max())
    if isinstance(a, bytes | bytearray) or not (a.is_floating_point() or a.is_complex()):
        return None
    import torch

    wide_dtype = torch.complex128 if a.is_complex() else torch.float64
    index = torch.from_numpy(where)
    try:
        a, b = (value.reshape(-1)[index].to(wide_dtype) for value in (a, b))
    except RuntimeError:
        # Types that PyTorch stores but cannot convert, such as packed 4-bit floats.
        return None
    return float((a - b).abs().max())


def _greater(a: float | None, b: float | None) -> float | None:
    """The greater one; None gives way, and nan does not."""
    if a is None or b is None:
        return b if a is None else a
    return a if math.isnan(a) or a > b else b
