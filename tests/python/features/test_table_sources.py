"""`penstock.features.open`: tables of every kind, and files that lie about themselves."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy
from safetensors.torch import save_file

import penstock
from features.table_files import found_bytes, found_rows, numbers
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PartialCheckpointError,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)
from penstock.features.features import Features
from penstock.features.sources.source import find
from penstock.features.writing.write import write

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.features.sources.source import Source

TABLE = numbers(50, 12)
LABELS = np.arange(50)


def assert_gathered(source: Source, table: Any) -> None:
    """Checks that gathered rows of a source equal the table's."""
    ids = np.random.default_rng(1).integers(0, len(table), 200)
    with Features(source) as features:
        assert features.gather(ids).tobytes() == table[ids].tobytes()


def safetensors(path: Path, table: Any, **others: Any) -> Path:
    tensors = {"table": table, **others}
    save_file({name: torch.from_numpy(one.copy()) for name, one in tensors.items()}, path)
    return path


def test_a_tensor_of_a_checkpoint(tmp_path: Path) -> None:
    """By its name in the state, among other values, and also as part of another tensor."""
    whole = torch.from_numpy(TABLE.copy())
    state = {
        "nodes": {"paper": whole, "year": torch.from_numpy(LABELS), "some": whole[10:30]},
        "array": numbers(7, 3, dtype=np.int16),
        "turned": whole.T,
        "step": 3,
        "number": torch.tensor(3.0),
    }
    penstock.save(tmp_path / "a", state)
    source = find(tmp_path / "a", "nodes.paper")
    assert (source.rows, source.row_shape, source.dtype) == (50, (12,), "float32")
    assert (source.key, source.checks, source.padding_bytes) == ("nodes.paper", None, 0)
    assert found_rows(source).tobytes() == TABLE.tobytes()
    assert_gathered(source, TABLE)
    assert found_bytes(find(tmp_path / "a", "nodes.some")) == TABLE[10:30].tobytes()
    assert found_rows(find(tmp_path / "a", "nodes.year")).tolist() == LABELS.tolist()
    assert found_bytes(find(tmp_path / "a", "array")) == state["array"].tobytes()
    assert find(tmp_path / "a", "array", shape=(None, 3), dtype=torch.int16).rows == 7

    def refused(error: type[Exception], match: str, *given: Any, **said: Any) -> None:
        with pytest.raises(error, match=match):
            find(tmp_path / "a", *given, **said)

    refused(StateMismatchError, "pass key= with one of them: 'array', 'nodes.paper'")
    refused(StateMismatchError, "no tensor 'paper': there is 'array'", "paper")
    refused(StateMismatchError, "not of shape=", "array", shape=(7, 4))
    refused(StateMismatchError, "not of dtype='int32'", "array", dtype="int32")
    refused(UnsupportedStateError, "transposed view", "turned")
    refused(UnsupportedStateError, "no rows", "number")


def test_the_newest_step_of_a_store_which_stays(tmp_path: Path) -> None:
    store = penstock.CheckpointStore(tmp_path / "run", keep_last=1)
    for step in (1, 2):
        store.save(step, {"table": torch.full((4, 5), float(step))})
    source = find(tmp_path / "run")
    assert found_rows(source).tolist() == [[2.0] * 5] * 4
    store.save(3, {"table": torch.zeros(4, 5)})
    assert found_rows(source).tolist() == [[2.0] * 5] * 4
    source.release()
    store.save(4, {"table": torch.zeros(4, 5)})
    assert not Path(source.segments[0].path).exists()


@pytest.mark.slow
def test_a_table_that_several_ranks_have_saved(jobs: Any, disk_path: Path) -> None:
    from features.tables import SHAPE, save_cut

    for outcome in jobs.of(3).call(save_cut, disk_path / "a"):
        assert outcome is None
    source = find(disk_path / "a", "rows")
    assert len({one.path for one in source.segments}) == 3
    expected = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
    assert found_bytes(source) == expected.numpy().tobytes()
    assert_gathered(source, expected.numpy())
    with pytest.raises(UnsupportedStateError, match="cut into columns"):
        find(disk_path / "a", "columns")


def test_safetensors(tmp_path: Path) -> None:
    """A file, a directory, and one with an index, which lists the files that count."""
    file = safetensors(tmp_path / "a.safetensors", TABLE, labels=LABELS)
    for path in (file, tmp_path):
        source = find(path)
        assert (source.key, source.rows, source.row_shape) == ("table", 50, (12,))
        assert found_bytes(source) == TABLE.tobytes()
        assert_gathered(source, TABLE)
        assert found_rows(find(path, "labels")).tolist() == LABELS.tolist()
    safetensors(tmp_path / "b.safetensors", TABLE + 1, more=TABLE)
    with pytest.raises(CorruptCheckpointError, match=r"is in .* and in"):
        find(tmp_path, "table")
    index = tmp_path / "model.safetensors.index.json"
    places = {"table": "b.safetensors", "more": "b.safetensors", "labels": "a.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    assert found_bytes(find(tmp_path, "table")) == (TABLE + 1).tobytes()
    with pytest.raises(StateMismatchError, match="'more', 'table'"):
        find(tmp_path)
    places["labels"] = "b.safetensors"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CorruptCheckpointError, match="does not have it"):
        find(tmp_path, "labels")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"table": "../a.safetensors"}}',
        '{"weight_map": {"table": 7}}',
        '{"weight_map": {"table": ""}}',
        "[" * 100_000,
    ],
)
def test_an_index_that_makes_no_sense(tmp_path: Path, text: str) -> None:
    safetensors(tmp_path / "a.safetensors", TABLE)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json does not say"):
        find(tmp_path, "table")


def entry(shape: Any = (2, 3), offsets: Any = (0, 24), dtype: Any = "F32") -> bytes:
    return json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"t":' * 50_000,
        entry(offsets=(0, 25)),
        entry(offsets=(24, 0)),
        entry(offsets=(1 << 62, (1 << 62) + 24)),
        entry(shape=(2, -3)),
        entry(shape=(1 << 62, 1 << 62)),
        entry(shape=(2, 3.0)),
        entry(shape=(True, 6)),
        entry(shape="23"),
        entry(shape=None),
        entry(offsets=(0,)),
        entry(dtype=None),
        b'{"t": 3}',
    ],
)
def test_a_hostile_header_of_safetensors(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    with pytest.raises(CorruptCheckpointError, match=r"a\.safetensors: .*get the file"):
        find(path)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 9])
def test_a_file_of_safetensors_that_ends_in_its_header(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((struct.pack("<Q", 1 << 60) + b"{}")[:nbytes])
    with pytest.raises(CorruptCheckpointError, match="header"):
        find(path)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("table", [TABLE, LABELS, TABLE.reshape(50, 3, 4), TABLE[:0]])
def test_npy(tmp_path: Path, version: tuple[int, int], table: Any) -> None:
    path = tmp_path / "table.npy"
    with path.open("wb") as file:
        npy.write_array(file, table, version=version)
    source = find(path)
    assert (source.rows, source.row_shape) == (len(table), table.shape[1:])
    assert source.dtype == table.dtype.name
    assert found_bytes(source) == table.tobytes()
    assert source.checks is None


def test_npy_of_types_that_numpy_calls_void(tmp_path: Path) -> None:
    values = torch.randn(5, 6).bfloat16()
    np.save(tmp_path / "a.npy", values.view(torch.int16).numpy().view("V2"))
    source = find(tmp_path / "a.npy", dtype=torch.bfloat16)
    assert source.dtype == "bfloat16"
    assert found_bytes(source) == values.view(torch.int16).numpy().tobytes()
    with pytest.raises(UnsupportedStateError, match="pass dtype="):
        find(tmp_path / "a.npy")
    with pytest.raises(UnsupportedStateError, match="pass dtype="):
        find(tmp_path / "a.npy", dtype="float32")


def _npy(header: str, version: bytes = b"\1\0") -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x93NUMPY", CorruptCheckpointError),
        (b"\x93NUMPY\1\0\xff\xff{}", CorruptCheckpointError),
        (_npy("{}", b"\7\0"), CorruptCheckpointError),
        (_npy("{}"), CorruptCheckpointError),
        (_npy("__import__('os').abort()"), CorruptCheckpointError),
        (_npy("(" * 9_000), CorruptCheckpointError),
        (
            _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, -3)}"),
            CorruptCheckpointError,
        ),
        (
            _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10**9, 10**9)}"),
            CorruptCheckpointError,
        ),
        (
            _npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({1 << 62}, {1 << 62})}}"),
            CorruptCheckpointError,
        ),
        (
            _npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}"),
            UnsupportedStateError,
        ),
        (
            _npy("{'descr': '|O', 'fortran_order': False, 'shape': (2, 3)}"),
            UnsupportedStateError,
        ),
        (
            _npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}"),
            UnsupportedStateError,
        ),
        (
            _npy("{'descr': '<f4', 'fortran_order': False, 'shape': ()}"),
            UnsupportedStateError,
        ),
        (
            _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 0)}"),
            UnsupportedStateError,
        ),
    ],
)
def test_npy_that_is_none(tmp_path: Path, data: bytes, error: type[Exception]) -> None:
    path = tmp_path / "table.npy"
    path.write_bytes(data + bytes(23))
    with pytest.raises(error, match=r"table\.npy"):
        find(path)


def test_a_file_of_rows_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "node_feat.npy"
    path.write_bytes(TABLE.tobytes())
    for shape in ((50, 12), (None, 12)):
        source = find(path, shape=shape, dtype="float32")
        assert (source.rows, source.row_shape, source.key) == (50, (12,), "")
        assert_gathered(source, TABLE)
        assert found_rows(source).tobytes() == TABLE.tobytes()
    assert find(path, shape=(50, 24), dtype=torch.bfloat16).row_bytes == 48

    def refused(match: str, **said: Any) -> None:
        with pytest.raises(StateMismatchError, match=match):
            find(path, **said)

    refused("pass shape= and dtype=")
    refused("is too short: it has 2400 bytes", shape=(51, 12), dtype="float32")
    refused("is too long: it has 2400 bytes", shape=(49, 12), dtype="float32")
    refused("no rows of 28, 20 are left", shape=(None, 7), dtype="float32")
    refused("is too long", shape=(5, 0), dtype="float32")
    for shape in ((), (-1, 3), (3, None)):
        with pytest.raises(ValueError, match="shape="):
            find(path, shape=shape, dtype="float32")
    for dtype in ("float31", object, 3):
        with pytest.raises(TypeError, match="dtype="):
            find(path, shape=(50, 12), dtype=dtype)


def test_what_a_header_says_has_to_be_what_the_caller_says(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", TABLE)
    safetensors(tmp_path / "a.safetensors", TABLE)
    for path in (tmp_path / "a.npy", tmp_path / "a.safetensors"):
        assert find(path, shape=(50, 12), dtype=np.float32).rows == 50
        with pytest.raises(StateMismatchError, match="not of shape="):
            find(path, shape=(50, 13), dtype=np.float32)
        with pytest.raises(StateMismatchError, match="not of dtype="):
            find(path, shape=(50, 12), dtype="int32")


def _empty_directory(path: Path) -> None:
    path.mkdir()


def _unfinished(path: Path) -> None:
    penstock.save(path, {"table": torch.zeros(3, 4)})
    (path / "manifest.json").unlink()


def _salvaged(path: Path) -> None:
    penstock.save(path, {"table": torch.zeros(3000, 400), "b": torch.ones(3)})
    shard = next(path.glob("shard-*"))
    with shard.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\xff")
    penstock.salvage(path, path.with_name("out"))
    os.rename(path, path.with_name("before"))
    os.rename(path.with_name("out"), path)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda path: None, CheckpointNotFoundError, "nothing is there"),
        (os.mkfifo, StorageError, "neither a file nor a directory"),
        (_empty_directory, CheckpointNotFoundError, "no safetensors file"),
        (_unfinished, IncompleteCheckpointError, "no complete"),
        (_salvaged, PartialCheckpointError, "table"),
        (lambda path: path.write_bytes(b"PK\3\4"), StateMismatchError, "does not begin"),
        (lambda path: penstock.save(path, {"a": 3}), StateMismatchError, "no tensor"),
    ],
)
def test_nothing_to_find(
    tmp_path: Path, make: Callable[[Path], Any], error: type[Exception], match: str
) -> None:
    make(tmp_path / "x")
    with pytest.raises(error, match=match):
        find(tmp_path / "x")


def test_a_shard_is_no_file_of_its_own(tmp_path: Path) -> None:
    penstock.save(tmp_path / "a", {"table": torch.zeros(3, 4)})
    shard = next((tmp_path / "a").glob("shard-*"))
    with pytest.raises(CheckpointNotFoundError, match="pass the directory"):
        find(shard)


def _checks_in(tensor: Any) -> dict[str, Any]:
    return {"tensor": tensor, "digest": "crc32c", "block_bytes": 4096}


@pytest.mark.parametrize(
    "note",
    [
        3,
        {"t": 3},
        {"t": {}},
        {"t": {"row_shape": 3}},
        {"t": {"row_shape": [-1]}},
        {"t": {"row_shape": [True]}},
        {"t": {"row_shape": [5]}},
        {"t": {"row_shape": [1 << 62, 1 << 62]}},
        {"t": {"row_shape": [4], "checks": 3}},
        {"t": {"row_shape": [4], "checks": {}}},
        {"t": {"row_shape": [4], "checks": _checks_in(3)}},
        {"t": {"row_shape": [4], "checks": _checks_in("no")}},
        {"t": {"row_shape": [4], "checks": _checks_in("a")}},
    ],
)
def test_a_note_that_makes_no_sense(tmp_path: Path, note: Any) -> None:
    state = {"t": torch.zeros(3, 4), "a": np.zeros(3, np.uint32)}
    penstock.save(tmp_path / "a", state, metadata={"penstock.features": note})
    with pytest.raises(CorruptCheckpointError, match="metadata"):
        find(tmp_path / "a", "t")


def test_checks_of_a_kind_that_is_not_known_are_none(tmp_path: Path) -> None:
    checks = {"tensor": "a", "digest": "blake3", "block_bytes": 4096}
    note = {"t": {"row_shape": [3], "checks": checks}}
    penstock.save(tmp_path / "a", {"t": torch.zeros(3, 4)}, metadata={"penstock.features": note})
    source = find(tmp_path / "a")
    assert (source.checks, source.row_shape, source.padding_bytes) == (None, (3,), 4)


def test_a_table_stays_what_it_is_when_its_checkpoint_is_copied(tmp_path: Path) -> None:
    """Its metadata and checksums are part of the state that a salvage copies."""
    table = numbers(500, 600)
    write(tmp_path / "a", table, align=True, key="x")
    penstock.salvage(tmp_path / "a", tmp_path / "b")
    one, other = find(tmp_path / "a"), find(tmp_path / "b")
    assert found_bytes(one) == found_bytes(other)
    assert_gathered(other, table)
    assert one.checks is not None
    assert other.checks is not None
    assert (one.checks == other.checks).all()


@given(data=st.binary(max_size=200), suffix=st.sampled_from(["", ".npy", ".safetensors"]))
def test_any_bytes_are_a_table_or_a_named_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    for start in (b"", b"\x93NUMPY\1\0", struct.pack("<Q", max(0, len(data) - 8))):
        path.write_bytes(start + data)
        try:
            source = find(path)
        except penstock.PenstockError as error:
            if str(path) not in str(error):
                raise
        else:
            assert len(found_bytes(source)) == source.rows * source.row_bytes
