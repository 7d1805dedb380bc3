"""Rows that say which they are, so that whoever gathers one can be caught with another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

WORD_BYTES = 8
ROW_BYTES_MIN = 2 * WORD_BYTES
_CHUNK_BYTES = 16 << 20

# The finalizer of SplitMix64 (Steele et al., OOPSLA 2014): what it makes of counted numbers no
# compression of a peer makes less of.
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def rows_of(ids: np.ndarray[Any, Any], row_bytes: int) -> np.ndarray[Any, Any]:
    """The rows of some ids: int64 of shape (ids, words)."""
    words = row_bytes // WORD_BYTES
    first = ids.astype(np.uint64) * np.uint64(words) + np.uint64(1)
    return _mixed(first[:, None] + np.arange(words, dtype=np.uint64))


def ends_of(ids: np.ndarray[Any, Any], row_bytes: int) -> np.ndarray[Any, Any]:
    """The first and the last word of each row: int64 of shape (ids, 2)."""
    words = np.uint64(row_bytes // WORD_BYTES)
    first = ids.astype(np.uint64) * words + np.uint64(1)
    return _mixed(np.stack([first, first + words - np.uint64(1)], axis=-1))


def chunks(rows: int, row_bytes: int) -> Iterator[np.ndarray[Any, Any]]:
    """All rows of a table, some at a time."""
    step = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, rows, step):
        yield rows_of(np.arange(first, min(first + step, rows)), row_bytes)


def first_wrong(
    found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]
) -> str | None:
    """Which row is not that of its id, if one is not."""
    wrong = np.flatnonzero((found != expected).any(axis=1))
    if not len(wrong):
        return None
    return f"row {wrong[0]} of a batch is not that of id {ids[wrong[0]]}"


def _mixed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scrambles numbers where they are."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        values ^= values >> shift
        values *= factor
    values ^= values >> _SHIFTS[-1]
    return values.view(np.int64)
