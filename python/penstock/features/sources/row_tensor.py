"""`RowTensor`: where the rows of a tensor are, in one file or several."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.io.files.extents import FileRange

_SIZE_MAX = (1 << 48) - 1
"""Largest dimension: caches number rows with 48 bits."""


class RowTensor(NamedTuple):
    """A tensor whose first dimension counts rows.

    Attributes:
        dtype: Name of its element type, as in `docs/format.md`.
        item_bytes: Bytes of an element.
        shape: Its shape.
        runs: The file ranges that hold its bytes, in order; None if they are scattered.
    """

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    runs: tuple[FileRange, ...] | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.item_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape) * self.item_bytes


def sizes_of(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    """Validates the shape of a table: the number of rows (None if unknown) and a row's shape."""
    try:
        sizes = tuple(None if size is None else operator.index(size) for size in shape)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"shape={shape!r:.80}: must be a tuple of the number of rows, or None, and the sizes of"
            " a row"
        ) from None
    if not sizes or None in sizes[1:] or any(not 0 <= (size or 0) <= _SIZE_MAX for size in sizes):
        raise ValueError(
            f"shape={shape!r}: must be the number of rows, or None, and the sizes of a row"
        )
    return sizes
