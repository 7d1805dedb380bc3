"""`RowChunks`: rows passed by a caller, as consecutive bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import UnsupportedStateError
from penstock.features.sources.elements import name_of
from penstock.features.sources.row_tensor import sizes_of
from penstock.tensors import dtypes
from penstock.tensors.copying import byte_view
from penstock.tensors.memory import check_strided, of_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PART_BYTES = 4 << 20
"""Bytes of rows copied at a time: still in the processor's cache when they are copied again."""

_BYTES_MAX = 1 << 60


class RowChunks:
    """Rows of one shape and type, which arrive in chunks.

    Args:
        rows: An array or tensor of all rows, or an iterable of arrays or tensors of some.
        shape: The number of rows (None if unknown) and the shape of a row; None to take the shape
            of the first chunk.
        dtype: The element type; None to take that of the first chunk.

    Attributes:
        dtype: Name of the element type.
        item_bytes: Bytes of an element.
        row_shape: The shape of a row.
        count: The expected number of rows; None if unknown.
        rows: Rows received so far.
    """

    def __init__(self, rows: Any, shape: Sequence[int | None] | None, dtype: Any) -> None:
        self._chunks: Iterator[Any] = iter([rows] if _is_chunk(rows) else _iterated(rows))
        self._first: Any = None
        if shape is None or dtype is None or _is_chunk(rows):
            self._first = next(self._chunks, None)
        first = self._first
        if first is not None:
            _check_chunk(first, 0)
        elif shape is None or dtype is None:
            raise ValueError("rows: there are none, which tells neither: pass shape= and dtype=")
        said = None if shape is None else sizes_of(shape)
        self.dtype = name_of(first.dtype if dtype is None else dtype)
        if self.dtype not in dtypes.ITEM_BYTES:
            raise UnsupportedStateError(
                f"rows of {self.dtype} cannot be stored: convert them with .astype(…) first",
                key="rows",
            )
        self.item_bytes = dtypes.ITEM_BYTES[self.dtype]
        self.row_shape = tuple(
            first.shape[1:] if said is None else (size or 0 for size in said[1:])
        )
        self.rows = 0
        self.count = None if said is None else said[0]
        if self.count is None and _is_chunk(rows):
            self.count = len(rows)
        if self.value_bytes == 0:
            raise ValueError(f"rows of the shape {self.row_shape} have no bytes: drop the table")
        if (self.count or 0) * self.value_bytes > _BYTES_MAX:
            raise ValueError(f"shape={shape!r}: no file is as large as that table")

    @property
    def value_bytes(self) -> int:
        """Bytes of the elements of a row, without padding."""
        return int(math.prod(self.row_shape) * self.item_bytes)

    def parts(self, row_bytes: int) -> Iterator[np.ndarray[Any, Any]]:
        """Yields all rows as arrays of bytes, each valid until the next one is requested.

        A row takes ``row_bytes``; padding is zeros.
        """
        for index, chunk in enumerate(self._all()):
            self._check(chunk, index)
            self.rows += len(chunk)
            if self.count is not None and self.rows > self.count:
                raise self._miscounted(f"chunk {index} ends with row {self.rows}")
            yield from self._parts_of(chunk, row_bytes)
        if self.count is not None and self.rows < self.count:
            raise self._miscounted(f"{self.rows} came")

    def _all(self) -> Iterator[Any]:
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        yield from self._chunks

    def _check(self, chunk: Any, index: int) -> None:
        _check_chunk(chunk, index)
        if tuple(chunk.shape[1:]) != self.row_shape:
            raise ValueError(
                f"chunk {index} has rows of the shape {tuple(chunk.shape[1:])}, not of"
                f" {self.row_shape}: all rows of a table have one shape"
            )
        if name_of(chunk.dtype) != self.dtype:
            raise TypeError(
                f"chunk {index} is of {name_of(chunk.dtype)}, not of {self.dtype}: convert it first"
            )

    def _miscounted(self, how: str) -> ValueError:
        return ValueError(
            f"there had to be {self.count} rows, {how}: correct shape=, or pass None for their"
            " number"
        )

    def _parts_of(self, chunk: Any, row_bytes: int) -> Iterator[np.ndarray[Any, Any]]:
        if row_bytes == self.value_bytes and _lies_together(chunk):
            yield _bytes_of(chunk)
            return
        step = max(1, _PART_BYTES // row_bytes)
        padded = np.zeros((min(step, len(chunk)), row_bytes), np.uint8)
        for begin in range(0, len(chunk), step):
            some = chunk[begin : begin + step]
            here = padded[: len(some)]
            here[:, : self.value_bytes] = _bytes_of(some).reshape(len(some), self.value_bytes)
            yield here.reshape(-1)


def _is_chunk(rows: Any) -> bool:
    return isinstance(rows, np.ndarray) or dtypes.is_tensor(rows)


def _iterated(rows: Any) -> Iterator[Any]:
    if isinstance(rows, Mapping):
        raise TypeError(
            "rows: a mapping: write each of its arrays as a table of its own (key=), or make a"
            " penstock.features.Table, whose rows have columns"
        )
    try:
        return iter(rows)
    except TypeError:
        raise TypeError(
            f"rows={type(rows).__name__}: pass an array, a tensor, or an iterable of such"
        ) from None


def _check_chunk(chunk: Any, index: int) -> None:
    if not _is_chunk(chunk):
        raise TypeError(f"chunk {index} is {type(chunk).__name__}: must be an array or a tensor")
    if dtypes.is_tensor(chunk):
        check_strided(chunk, f"chunk {index}")
    if not chunk.shape:
        raise ValueError(f"chunk {index} is a single number: must be rows, as of array[None]")


def _lies_together(chunk: Any) -> bool:
    if isinstance(chunk, np.ndarray):
        return chunk.flags.c_contiguous
    return bool(chunk.is_contiguous() and chunk.is_cpu)


def _bytes_of(chunk: Any) -> np.ndarray[Any, Any]:
    """The elements of a chunk in row-major order, as bytes."""
    if isinstance(chunk, np.ndarray):
        return np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
    plain = chunk.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    # Refuses a tensor without readable memory, with the reason.
    of_tensor(plain, "rows")
    flat: np.ndarray[Any, Any] = byte_view(plain).numpy()
    return flat
