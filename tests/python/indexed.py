"""Indexed datasets of known content, written as Megatron-Core's format says, without it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}


def rows_of(lengths: Sequence[int], dtype: str, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Rows of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 120, length).astype(dtype) for length in lengths]


def write_indexed(
    prefix: Path,
    rows: Sequence[np.ndarray[Any, Any]],
    dtype: str,
    *,
    modes: Sequence[int] | None = None,
    documents: Sequence[int] | None = None,
    pointers: Sequence[int] | None = None,
) -> str:
    """Writes a dataset; returns its prefix.

    Args:
        prefix: Path without suffix.
        rows: The rows.
        dtype: Their type.
        modes: The mode of each row.
        documents: The first row of each document, and the number of rows; each row is one if None.
        pointers: Where the index says that each row begins; the truth if None.
    """
    data = b"".join(row.astype(dtype).tobytes() for row in rows)
    lengths = [len(row) for row in rows]
    if pointers is None:
        ends = np.cumsum([0, *lengths]) * np.dtype(dtype).itemsize
        pointers = ends[:-1].tolist()
    documents = list(range(len(rows) + 1)) if documents is None else documents
    index = struct.pack("<9sQBQQ", b"MMIDIDX", 1, CODES[dtype], len(rows), len(documents))
    index += struct.pack(f"<{len(rows)}i", *lengths)
    index += struct.pack(f"<{len(rows)}q", *pointers)
    index += struct.pack(f"<{len(documents)}q", *documents)
    if modes is not None:
        index += struct.pack(f"<{len(rows)}b", *modes)
    prefix.with_suffix(".bin").write_bytes(data)
    prefix.with_suffix(".idx").write_bytes(index)
    return str(prefix)
