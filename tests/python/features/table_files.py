"""Tables for tests, and readers of them that share no code with Penstock."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import _native
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.features.sources.source import Source

_POLYNOMIAL = 0x82F6_3B78


def numbers(rows: int, *row_shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """Returns an array of random bytes."""
    count = rows * int(np.prod(row_shape, dtype=int)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if np.dtype(dtype) == bool:
        data &= 1
    return data.view(dtype).reshape(rows, *row_shape)


def found_bytes(source: Source) -> bytes:
    """Returns the rows of a source one after the other, read by plain file reads."""
    found = b""
    rows = 0
    for one in source.segments:
        assert one.first_row == rows
        rows += one.rows
        with open(one.path, "rb") as file:
            file.seek(one.offset)
            stored = np.frombuffer(file.read(one.rows * source.row_bytes), np.uint8)
        values = stored.reshape(one.rows, -1)[:, : source.row_bytes - source.padding_bytes]
        found += values.tobytes()
    assert rows == source.rows
    return found


def found_rows(source: Source) -> Any:
    """Returns `found_bytes` as an array."""
    kind = dtypes.numpy_dtype(source.dtype)
    return np.frombuffer(found_bytes(source), kind).reshape(source.rows, *source.row_shape)


def crc32c(data: bytes) -> int:
    """Computes CRC-32C bit by bit."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


def reader_of(source: Source, direct: str = "auto") -> Any:
    """Returns a reader of a source without a cache, and its workers."""
    files = [_native.DataFile.open(one.path, False, direct) for one in source.segments]
    workers = _native.Executor(
        engine="auto",
        workers=1,
        queue_depth=32,
        in_flight_bytes=32 << 20,
        block_bytes=1 << 20,
        staging_bytes=8 << 20,
    )
    segments = [
        (file, one.offset, one.rows) for file, one in zip(files, source.segments, strict=True)
    ]
    reader = _native.RowReader(
        workers,
        1,
        segments,
        row_bytes=source.row_bytes,
        value_bytes=source.row_bytes - source.padding_bytes,
        checks=None if source.checks is None else as_native(source.checks),
        cache=None,
        gap_bytes=0,
        run_bytes_max=1 << 20,
    )
    return reader, workers


def as_native(array: Any) -> tuple[Any, ...]:
    """Returns an array as the native module takes it."""
    return array.ctypes.data, array.shape, None, array.itemsize, array


def gathered(reader: Any, ids: Any, out: Any) -> None:
    """Gathers rows, and waits for them."""
    target = out.ctypes.data, out.nbytes, out
    reader.gather(as_native(ids), True, target, None).wait(None)


def files_below(directory: Path) -> Iterator[str]:
    """Yields the names of all files below a directory."""
    for _, _, names in os.walk(directory):
        yield from names
