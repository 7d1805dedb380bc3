"""Damaged rows are named, and never returned."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from features.table_files import gathered, numbers, reader_of
from penstock.errors import CorruptCheckpointError
from penstock.features.sources.source import find
from penstock.features.writing.write import write

if TYPE_CHECKING:
    from pathlib import Path

FLIPS = 10_000
NAMED = re.compile(r"row (\d+) is damaged: bytes (\d+) to (\d+) of")


def _refusal(reader: Any, row: int, out: Any) -> CorruptCheckpointError | None:
    try:
        gathered(reader, np.array([row]), out)
    except CorruptCheckpointError as error:
        return error
    return None


def flip(descriptor: int, offset: int, bit: int) -> None:
    """Flips a bit of a file."""
    (byte,) = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([byte ^ 1 << bit]), offset)


@pytest.mark.parametrize("columns", [1024, 128, 300])
def test_each_of_ten_thousand_flipped_bits_is_told_with_its_row(
    disk_path: Path, columns: int
) -> None:
    """Rows of one block, rows that share one, and rows across several; padding counts as well."""
    rows = 4096 * 2048 // (columns * 4)
    table = numbers(rows, columns)
    write(disk_path / "table", table, align=False)
    source = find(disk_path / "table")
    assert source.checks is not None
    (segment,) = source.segments
    random = np.random.default_rng(columns)
    content = np.memmap(segment.path, np.uint8, "r+", offset=segment.offset)
    assert content.size == rows * source.row_bytes
    flips = FLIPS if columns == 1024 else FLIPS // 10
    # No place twice.
    places = random.choice(content.size * 8, flips, replace=False)
    # Through the page cache, as flipped bits may not be written back yet.
    reader, workers = reader_of(source, "off")
    out = np.zeros((1, columns), np.float32)
    told = 0
    for byte, bit in zip(places // 8, places % 8, strict=True):
        row = byte // source.row_bytes
        content[byte] ^= 1 << bit
        error = _refusal(reader, row, out)
        content[byte] ^= 1 << bit
        assert error is not None
        named, first, last = map(int, NAMED.findall(str(error))[0])
        assert named == row
        assert first <= segment.offset + byte <= last < first + 4096
        assert error.file == os.path.basename(segment.path)
        told += 1
    assert told == flips
    every = np.empty_like(table)
    gathered(reader, np.arange(rows), every)
    assert every.tobytes() == table.tobytes()
    workers.close()


def test_rows_beside_a_damaged_block_are_returned(disk_path: Path) -> None:
    table = numbers(3000, 128)
    write(disk_path / "table", table)
    source = find(disk_path / "table")
    (segment,) = source.segments
    block = 17
    descriptor = os.open(segment.path, os.O_RDWR)
    flip(descriptor, segment.offset + block * 4096 + 100, 3)
    os.fsync(descriptor)
    os.close(descriptor)
    reader, workers = reader_of(source)
    rows = np.arange(len(table))
    intact = rows[rows // 8 != block]
    out = np.zeros((len(intact), 128), np.float32)
    gathered(reader, intact, out)
    assert out.tobytes() == table[intact].tobytes()
    with pytest.raises(CorruptCheckpointError, match=f"row {block * 8} is damaged"):
        gathered(reader, rows, np.zeros_like(table))
    workers.close()


def test_verify_and_load_find_it_too(disk_path: Path) -> None:
    write(disk_path / "table", numbers(3000, 128))
    source = find(disk_path / "table")
    (segment,) = source.segments
    descriptor = os.open(segment.path, os.O_RDWR)
    flip(descriptor, segment.offset + 1_000_000, 0)
    os.fsync(descriptor)
    os.close(descriptor)
    result = penstock.verify(disk_path / "table")
    assert [problem.tensor for problem in result.problems] == ["features"]
    with pytest.raises(CorruptCheckpointError) as caught:
        penstock.load(disk_path / "table")
    assert caught.value.tensor == "features"


@pytest.mark.parametrize("seed", range(8))
def test_damaged_checksums_are_found_when_the_table_is(disk_path: Path, seed: int) -> None:
    """By the checkpoint's digest of them: no row is read with wrong checksums."""
    write(disk_path / "table", numbers(3000, 128))
    tensors = {one.name: one for one in penstock.inspect(disk_path / "table").tensors}
    checks = tensors["features.crc32c"]
    random = np.random.default_rng(seed)
    place = int(random.integers(checks.begin, checks.end))
    descriptor = os.open(disk_path / "table" / checks.file, os.O_RDWR)
    flip(descriptor, place, int(random.integers(8)))
    os.fsync(descriptor)
    os.close(descriptor)
    with pytest.raises(CorruptCheckpointError) as caught:
        find(disk_path / "table")
    assert caught.value.tensor == "features.crc32c"
    assert find(disk_path / "table", check=False).checks is None


def _shrunk(path: str) -> None:
    os.truncate(path, os.stat(path).st_size - 4096)


def _replaced(path: str) -> None:
    with open(path, "rb") as file:
        content = file.read()
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(content)


@pytest.mark.parametrize("change", [_shrunk, _replaced, os.utime])
def test_marks_tell_that_a_file_has_changed(tmp_path: Path, change: Any) -> None:
    np.save(tmp_path / "a.npy", numbers(100, 1024))
    before = find(tmp_path / "a.npy")
    assert find(tmp_path / "a.npy").segments == before.segments
    change(before.segments[0].path)
    if change is _shrunk:
        with pytest.raises(CorruptCheckpointError, match=r"a\.npy: it ends after"):
            find(tmp_path / "a.npy")
    else:
        assert find(tmp_path / "a.npy").segments[0].mark != before.segments[0].mark


def test_a_shard_that_was_cut_is_refused(disk_path: Path) -> None:
    write(disk_path / "table", numbers(100, 1024))
    _shrunk(find(disk_path / "table").segments[0].path)
    with pytest.raises(CorruptCheckpointError):
        find(disk_path / "table")
