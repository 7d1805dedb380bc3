"""`penstock.features.write`: the written table, and the remains of a failed write."""

from __future__ import annotations

import errno
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import forks
import format_reader
import penstock
from conftest import mounted
from features.table_files import crc32c, files_below, found_bytes, found_rows, numbers
from penstock import _native
from penstock.errors import (
    CheckpointExistsError,
    IncompleteCheckpointError,
    StorageError,
    UnsupportedStateError,
)
from penstock.features.sources.source import find
from penstock.features.sources.table_metadata import blocks_per_row, row_bytes_for
from penstock.features.writing.write import write

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 16 << 20


def test_checksums_are_those_of_the_standard() -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    native = (data.ctypes.data, data.shape, None, 1, data)
    assert np.frombuffer(_native.block_checks(native), np.uint32) == [0xE306_9283]
    assert crc32c(b"123456789") == 0xE306_9283


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_types_that_safetensors_has_learnt_are_rows_for_others_too(
    tmp_path: Path, name: str
) -> None:
    values = torch.arange(96, dtype=torch.uint8).view(getattr(torch, name)).reshape(12, 8)
    write(tmp_path / "a", values)
    assert penstock.verify(tmp_path / "a").ok
    assert found_bytes(find(tmp_path / "a", "features")) == bytes(range(96))
    for path in (tmp_path / "a").glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            if "features" in opened.keys():  # noqa: SIM118
                found = opened.get_tensor("features")
                assert (found.dtype, found.shape) == (values.dtype, values.shape)
                assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
                return
    pytest.fail("no file has the table")


@pytest.mark.parametrize(
    ("rows", "row_shape", "dtype", "align"),
    [
        (1, (1,), np.uint8, "auto"),
        (0, (7,), np.float32, "auto"),
        (5, (), np.int64, "auto"),
        (1000, (100,), np.float32, "auto"),
        (1000, (100,), np.float32, True),
        (333, (768,), np.float32, "auto"),
        (333, (768,), np.float32, False),
        (100, (3, 5, 7), np.int16, True),
        (100, (3, 5, 7), np.int16, False),
        (9, (1250,), np.float32, True),
        (40_000, (128,), np.float32, "auto"),
        (4097, (1024,), np.float32, "auto"),
        (50, (6,), np.bool_, "auto"),
        (50, (6,), np.complex64, "auto"),
    ],
)
def test_what_was_written_is_there(
    disk_path: Path, rows: int, row_shape: tuple[int, ...], dtype: Any, align: Any
) -> None:
    """As a Penstock state, as a safetensors file, by the independent reader, and as rows."""
    table = numbers(rows, *row_shape, dtype=dtype)
    path = disk_path / "table"
    report = write(path, table, align=align)
    value_bytes = table.itemsize * int(np.prod(row_shape, dtype=int))
    assert (report.rows, report.row_shape) == (rows, row_shape)
    assert report.row_bytes - report.padding_bytes == value_bytes
    if align is False:
        assert report.padding_bytes == 0
    assert penstock.verify(path).ok

    state = penstock.load(path)
    assert list(state) == ["features", "features.crc32c"]
    loaded = state["features"].numpy()
    if report.padding_bytes:
        columns = value_bytes // table.itemsize
        assert not loaded[:, columns:].view(np.uint8).any()
        loaded = loaded[:, :columns].reshape(table.shape)
    assert loaded.shape == table.shape
    assert loaded.tobytes() == table.tobytes()

    source = find(path)
    assert (source.key, source.dtype) == ("features", np.dtype(dtype).name)
    assert (source.rows, source.row_shape) == (rows, row_shape)
    assert (source.row_bytes, source.padding_bytes) == (report.row_bytes, report.padding_bytes)
    assert found_bytes(source) == table.tobytes()
    for segment in source.segments:
        assert segment.offset % 4096 == 0
        with safe_open(segment.path, "np") as file:
            assert file.get_tensor("features").tobytes() == state["features"].numpy().tobytes()
    source.release()
    if rows < 10:
        checkpoint = format_reader.Checkpoint(path)
        assert {one.name for one in penstock.inspect(path).tensors} == set(state)
        assert len(checkpoint.tensors) == 2


def test_each_block_has_its_checksum(tmp_path: Path) -> None:
    """Also the last block, which is shorter, and rows with padding."""
    for rows, columns in ((7, 300), (7, 700)):
        table = numbers(rows, columns)
        write(tmp_path / "table", table, overwrite=True)
        source = find(tmp_path / "table")
        (segment,) = source.segments
        with open(segment.path, "rb") as file:
            stored = file.read()[segment.offset :]
        assert len(stored) == rows * source.row_bytes
        blocks = [stored[at : at + 4096] for at in range(0, len(stored), 4096)]
        assert source.checks is not None
        assert source.checks.tolist() == [crc32c(block) for block in blocks]
        assert find(tmp_path / "table", check=False).checks is None


def test_chunks_make_the_file_that_the_whole_makes(disk_path: Path) -> None:
    """However the table is cut: counted or not, arrays or tensors, in reused memory."""
    table = numbers(9_000, 600)
    assert table.nbytes > PIECE_BYTES
    buffer = np.empty((700, 600), np.float32)

    def reused() -> Iterator[Any]:
        for at in range(0, len(table), 700):
            some = table[at : at + 700]
            buffer[: len(some)] = some
            yield buffer[: len(some)]
            buffer[:] = -1

    ways: dict[str, dict[str, Any]] = {
        "reused": {"rows": reused()},
        "counted": {"rows": iter([table[:1], table[1:]]), "shape": (9_000, 600)},
        "list": {"rows": [table[:0], table[:8_999], table[8_999:]], "shape": (None, 600)},
        "strided": {"rows": np.asfortranarray(table)},
        "tensor": {"rows": torch.from_numpy(table.T.copy()).T},
        "said": {"rows": table, "shape": (9_000, 600), "dtype": "float32"},
    }
    for align in (False, True):
        write(disk_path / "whole", table, align=align, overwrite=True)
        expected = _shard(disk_path / "whole")
        for name, how in ways.items():
            if name == "reused":
                how = {"rows": reused()}
            elif name == "counted":
                how = {**how, "rows": iter([table[:1], table[1:]])}
            write(disk_path / name, **how, align=align, overwrite=True)
            assert _shard(disk_path / name) == expected, name
            assert penstock.verify(disk_path / name).ok


def _shard(path: Path) -> bytes:
    source = find(path)
    return Path(source.segments[0].path).read_bytes()


def test_types_that_only_tensors_have(tmp_path: Path) -> None:
    values = torch.randn(20, 33).bfloat16()
    report = write(tmp_path / "table", [values[:4], values[4:]], key="x.y", metadata={"run": 3})
    assert find(tmp_path / "table").dtype == "bfloat16"
    assert torch.equal(penstock.load(tmp_path / "table", keys="x.y")["x.y"], values)
    assert penstock.inspect(tmp_path / "table").metadata["run"] == 3
    assert report.key == "x.y"
    half = torch.zeros(3, 4, dtype=torch.uint1)
    with pytest.raises(UnsupportedStateError, match="uint1"):
        write(tmp_path / "other", half)


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"rows": [np.ones((2, 3)), np.ones((2, 4))]}, ValueError, "chunk 1 has rows of the shape"),
        ({"rows": [np.ones((2, 3)), np.ones((2, 3), "f4")]}, TypeError, "chunk 1 is of float32"),
        ({"rows": [np.ones((2, 3)), [[1.0]]]}, TypeError, "chunk 1 is list"),
        ({"rows": [np.ones((2, 3)), np.float64(3)]}, TypeError, "chunk 1 is float64"),
        ({"rows": np.ones((2, 3)), "shape": (3, 3)}, ValueError, "had to be 3 rows, 2 came"),
        ({"rows": np.ones((2, 3)), "shape": (1, 3)}, ValueError, "had to be 1 rows, chunk 0"),
        ({"rows": np.ones((2, 3)), "shape": (2, 4)}, ValueError, "chunk 0 has rows of the shape"),
        ({"rows": np.ones((2, 3)), "shape": ()}, ValueError, "shape="),
        ({"rows": np.ones((2, 3)), "shape": (-1, 3)}, ValueError, "shape="),
        ({"rows": np.ones((2, 3)), "shape": (1 << 62, 3)}, ValueError, "shape="),
        ({"rows": np.ones((2, 3)), "dtype": "f4"}, TypeError, "not of float32"),
        ({"rows": np.ones((2, 0))}, ValueError, "have no bytes"),
        ({"rows": np.array(3.0)}, ValueError, "single number"),
        ({"rows": []}, ValueError, "pass shape= and dtype="),
        ({"rows": 7}, TypeError, "pass an array"),
        ({"rows": np.ones((2, 3)).astype(">f8")}, UnsupportedStateError, ">f8"),
        ({"rows": np.array([["a"]])}, UnsupportedStateError, "<U1"),
        ({"rows": np.ones((2, 3)), "align": "yes"}, ValueError, "align="),
        ({"rows": np.ones((2, 3)), "key": ""}, ValueError, "key="),
        ({"rows": np.ones((2, 3)), "key": "__metadata__"}, ValueError, "key="),
        ({"rows": np.ones((2, 3)), "metadata": {1: 2}}, UnsupportedStateError, "metadata"),
        ({"rows": np.ones((2, 3)), "metadata": {"penstock.features": 1}}, ValueError, "is ours"),
    ],
)
def test_what_is_no_table_is_refused_and_leaves_nothing(
    tmp_path: Path, how: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        write(tmp_path / "table", **how)
    assert not list(tmp_path.iterdir())


def test_a_table_without_rows_says_what_they_would_be(tmp_path: Path) -> None:
    write(tmp_path / "table", iter([]), shape=(None, 4), dtype=torch.float16)
    source = find(tmp_path / "table")
    assert (source.rows, source.row_shape, source.dtype) == (0, (4,), "float16")
    assert source.segments == ()


def test_what_is_replaced_stays_until_the_new_one_is_there(disk_path: Path) -> None:
    path = disk_path / "table"
    old, new = numbers(4_000, 1024), numbers(5_000, 1024, seed=1)
    write(path, old)
    asked: list[int] = []

    def chunks(fail: bool) -> Iterator[Any]:
        for at in range(0, len(new), 1_000):
            source = find(path)
            assert found_rows(source).tobytes() == old.tobytes()
            source.release()
            asked.append(at)
            yield new[at : at + 1_000]
        if fail:
            raise LookupError("of the caller")

    with pytest.raises(CheckpointExistsError):
        write(path, chunks(False), shape=new.shape, dtype=new.dtype)
    assert not asked
    before = sorted(files_below(path))
    with pytest.raises(LookupError, match="of the caller"):
        write(path, chunks(True), overwrite=True)
    assert sorted(files_below(path)) == before
    write(path, chunks(False), overwrite=True)
    assert found_rows(find(path)).tobytes() == new.tobytes()
    assert len(list(path.glob("shard-*"))) == 2
    assert penstock.verify(path).ok


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, StorageError])
def test_an_interrupted_write_leaves_nothing(disk_path: Path, error: type[BaseException]) -> None:
    def chunks() -> Iterator[Any]:
        for _ in range(6):
            yield numbers(2_000, 1024)
        if error is StorageError:
            raise StorageError("of the caller", path="elsewhere", errno=errno.ENOSPC)
        raise error

    with pytest.raises(error) as caught:
        write(disk_path / "table", chunks())
    if error is StorageError:
        assert str(caught.value) == "of the caller"
    assert not (disk_path / "table").exists()


KILLED = """
    import os, signal, sys
    import numpy as np
    import torch
    from penstock.features import write

    def chunks():
        for at in range(6):
            yield np.full((4096, 1024), at, np.float32)
        os.kill(os.getpid(), signal.SIGKILL)

    write(sys.argv[1], chunks(), overwrite=True)
"""


def test_a_killed_write_leaves_what_was_there_and_the_next_one_tidies_up(disk_path: Path) -> None:
    path = disk_path / "table"
    done = forks.run(["-c", "\n".join(one[4:] for one in KILLED.splitlines()), str(path)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(path.glob("shard-*"))
    for ask in (penstock.load, find):
        with pytest.raises(IncompleteCheckpointError):
            ask(path)
    table = numbers(100, 16)
    write(path, table)
    done = forks.run(["-c", "\n".join(one[4:] for one in KILLED.splitlines()), str(path)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert found_rows(find(path)).tobytes() == table.tobytes()
    assert len(list(path.glob("shard-*"))) == 3
    write(path, table, overwrite=True)
    assert len(list(path.glob("shard-*"))) == 2


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("count", [40_000, None])
def test_a_full_disk_is_an_error_that_says_so(
    tmp_path: Path, need_root: None, kind: str, count: int | None
) -> None:
    asked = []

    def chunks() -> Iterator[Any]:
        for at in range(40):
            asked.append(at)
            yield np.ones((1_000, 1024), np.float32)

    with mounted(kind, tmp_path / "disk", 64 << 20) as disk:
        with pytest.raises(StorageError, match="no room for the table") as caught:
            write(disk / "table", chunks(), shape=(count, 1024), dtype=np.float32)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.path == str(disk / "table")
        # If the size is known, no further chunk is requested.
        assert bool(asked) == (count is None)
        assert not (disk / "table").exists()
        write(disk / "table", numbers(1_000, 1024))
        assert penstock.verify(disk / "table").ok


LEAN = """
    import json, resource, sys
    import numpy as np
    import torch
    from penstock.features import write

    chunk = np.ones((2048, 1024), np.float32)
    write(sys.argv[1] + "/small", [chunk])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write(sys.argv[1] + "/large", (chunk for _ in range(48)))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(after - before))
"""


def test_a_table_need_not_fit_into_memory(disk_path: Path) -> None:
    done = forks.run(["-c", "\n".join(one[4:] for one in LEAN.splitlines()), str(disk_path)])
    assert done.returncode == 0, done.stderr
    grown_kib = json.loads(done.stdout.splitlines()[-1])
    assert find(disk_path / "large").rows == 48 * 2048
    assert grown_kib < (48 * 8 * 1024) // 4


def test_the_ways_of_the_options(options: Any, disk_path: Path) -> None:
    table = numbers(5_000, 1024)
    write(disk_path / "table", table, options=options)
    assert found_rows(find(disk_path / "table")).tobytes() == table.tobytes()
    told: list[tuple[int, int]] = []
    write(
        disk_path / "table",
        [table[:2_500], table[2_500:]],
        shape=table.shape,
        overwrite=True,
        options=options,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1] == (table.nbytes, table.nbytes)
    assert all(done <= total == table.nbytes for done, total in told)


@given(
    value_bytes=st.integers(1, 20_000),
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    align=st.sampled_from(["auto", True, False]),
)
def test_padding_is_what_saves_blocks(value_bytes: int, item_bytes: int, align: Any) -> None:
    value_bytes *= item_bytes
    row_bytes = row_bytes_for(value_bytes, item_bytes, align)
    assert row_bytes % item_bytes == 0
    assert row_bytes >= value_bytes
    saved = blocks_per_row(value_bytes) / blocks_per_row(row_bytes)
    if row_bytes > value_bytes:
        assert align is not False
        assert saved > 1
    if align is True:
        assert blocks_per_row(row_bytes) == -(-value_bytes // 4096)
    if align == "auto":
        assert row_bytes <= 2 * value_bytes
        assert row_bytes == value_bytes or saved > row_bytes / value_bytes


@given(row_bytes=st.integers(1, 9_000))
def test_blocks_per_row_are_those_that_rows_straddle(row_bytes: int) -> None:
    rows = 4096
    firsts = np.arange(rows) * row_bytes
    blocks = (firsts + row_bytes - 1) // 4096 - firsts // 4096 + 1
    assert blocks.mean() == pytest.approx(blocks_per_row(row_bytes))
