"""`Ragged`: rows of different lengths, one after another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple


class Ragged(NamedTuple):
    """Rows of different lengths, as PyTorch's jagged tensors and ``EmbeddingBag`` take them.

    Attributes:
        values: The elements of all rows, one row after another: a tensor or an array.
        offsets: Where each row begins in ``values``, and the end of the last one, in elements:
            ``int64``, one more than there are rows.
    """

    values: Any
    offsets: Any

    def rows(self) -> list[Any]:
        """The rows: views of ``values``."""
        return [self.values[begin:end] for begin, end in pairwise(self.offsets.tolist())]
