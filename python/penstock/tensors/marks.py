"""`Boxes`: an array that lies in several pieces, as one leaf of a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """An array that lies in pieces; it is loaded as one array.

    The pieces are written from where they are: nothing puts them together first.

    Attributes:
        shape: Sizes of the whole array, none of them 0.
        dtype: Type of its elements.
        pieces: Index of the first element of each, and its elements. Those of all who save it are
            the whole array, without overlaps.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: Sequence[tuple[tuple[int, ...], np.ndarray[Any, Any]]]
