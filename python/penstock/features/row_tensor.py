"""`RowTensor`: a tensor of a file or of several, as far as its rows are concerned."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.io.extents import Run

_SIZE_MAX = (1 << 48) - 1
"""Of any dimension: caches number rows with so many bits."""


class RowTensor(NamedTuple):
    """A tensor whose first dimension counts rows.

    Attributes:
        dtype: Name of its type, as `docs/format.md` has them.
        item_bytes: Of an element.
        shape: Its sizes.
        runs: Where all of its bytes lie, in their order; None where they are scattered.
    """

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    runs: tuple[Run, ...] | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.item_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape) * self.item_bytes


def sizes_of(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    """The shape of a table as a caller has given it.

    Args:
        shape: The number of rows, or None where that is not known, and the sizes of a row.

    Raises:
        ValueError: It is none.
        TypeError: It is no sequence of integers.
    """
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
