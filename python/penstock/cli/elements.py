"""Compares two tensors, arrays or byte strings element by element, bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK_BYTES = 16 << 20
"""Bytes compared at a time; comparing them needs a few times as much memory."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Type and shape of a tensor.

    Attributes:
        dtype: Its element type; for arrays and byte strings with the kind of object.
        shape: Its shape.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of one kind differ.

    Attributes:
        elements: The number of elements of each.
        differing: Elements that differ in at least one bit.
        max_abs_difference: The largest absolute difference of two elements; None if elements are
            not floating-point or complex numbers; nan or inf if the difference is.
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


def difference(a: Any, b: Any, limit: int | None = None) -> Difference:
    """Compares two values of one kind, a bounded part of them at a time.

    Dimensions that both repeat, as of expanded tensors, are compared once and counted as often as
    they repeat. ``limit`` is the most elements to compare; None for any number.
    """
    elements = math.prod(kind(a).shape)
    if not elements:
        return Difference(0, 0, None)
    a, b, repeats = _once(_plain(a), _plain(b))
    looked_at = elements // repeats
    if limit is not None and looked_at > limit:
        raise ValueError(f"{looked_at} elements of a window over fewer than {limit}")
    differing, max_abs = 0, None
    for part_a, part_b in _parts(a, b):
        raw_a, raw_b = _raw(part_a), _raw(part_b)
        unequal = (raw_a != raw_b).reshape(-1, _item_bytes(part_a)).any(axis=1)
        count = int(unequal.sum())
        if count:
            differing += count * repeats
            max_abs = _greater(max_abs, _distance(part_a, part_b, np.flatnonzero(unequal)))
    return Difference(elements, differing, max_abs)


def _plain(value: Any) -> Any:
    """A tensor or array; a byte string as an array of bytes."""
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes | bytearray) else value


def _once(a: Any, b: Any) -> tuple[Any, Any, int]:
    """The values without the dimensions that both repeat, and the number of repetitions."""
    repeats = 1
    for dim, size in enumerate(a.shape):
        if size > 1 and _stride(a, dim) == 0 == _stride(b, dim):
            index = (slice(None),) * dim + (slice(0, 1),)
            a, b = a[index], b[index]
            repeats *= size
    return a, b, repeats


def _stride(value: Any, dim: int) -> int:
    return int(value.strides[dim] if isinstance(value, np.ndarray) else value.stride(dim))


def _item_bytes(value: Any) -> int:
    return int(value.itemsize)


def _parts(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Splits both into parts of bounded size, in the order of their elements, without copies."""
    shape = tuple(a.shape)
    if math.prod(shape) * _item_bytes(a) <= CHUNK_BYTES:
        yield a, b
        return
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    inner_bytes = math.prod(shape[dim + 1 :]) * _item_bytes(a)
    step = max(1, CHUNK_BYTES // inner_bytes)
    for begin in range(0, shape[dim], step):
        index = (slice(None),) * dim + (slice(begin, begin + step),)
        yield from _parts(a[index], b[index])


def _raw(value: Any) -> Bytes:
    """The bytes of all elements, in row-major order; contiguous memory is not copied."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    import torch

    if not value.is_contiguous():
        # PyTorch cannot copy int4 and similar types, but integers of their size.
        same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        value = value.view(same_size.get(value.itemsize, value.dtype))
    # `reshape` would keep a stride other than one for a single element.
    flat = value.contiguous().as_strided((value.numel(),), (1,))
    raw: Bytes = flat.view(torch.uint8).numpy()
    return raw


def _distance(a: Any, b: Any, where: np.ndarray[Any, Any]) -> float | None:
    """The largest absolute difference of elements at flat indices; None if they have none."""
    if isinstance(a, np.ndarray):
        if a.dtype.kind not in "fc":
            return None
        wide = np.dtype("complex128" if a.dtype.kind == "c" else "float64")
        with np.errstate(invalid="ignore"):
            apart = a.reshape(-1)[where].astype(wide) - b.reshape(-1)[where].astype(wide)
        return float(np.abs(apart).max())
    if not (a.is_floating_point() or a.is_complex()):
        return None
    import torch

    wide_dtype = torch.complex128 if a.is_complex() else torch.float64
    index = torch.from_numpy(where)
    try:
        a, b = (value.reshape(-1)[index].to(wide_dtype) for value in (a, b))
    except RuntimeError:
        # PyTorch stores some types without converting them, such as packed 4-bit floats.
        return None
    return float((a - b).abs().max())


def _greater(a: float | None, b: float | None) -> float | None:
    """The larger one; a number replaces None, and nan counts as largest."""
    if a is None or b is None:
        return b if a is None else a
    return a if math.isnan(a) or a > b else b
