"""`docs/format.md` suffices to write a reader: this one agrees with Penstock on everything.

Golden files under `tests/golden` have to load forever, with Penstock and with this reader.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open

import format_reader
import penstock
import three_ranks
from compare import assert_same, plain_text, tensor_bytes, tensors_in
from conftest import REPOSITORY
from forge import Forgery, encode
from format_reader import (
    CHUNK_BYTES,
    Checkpoint,
    FormatError,
    Other,
    Tensor,
    boxes_of_shard,
    crc64,
    digest,
)
from penstock.errors import FormatVersionError
from states import states

GOLDEN = REPOSITORY / "tests" / "golden"


def _load_make():
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load_make()

PLAIN_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}


def neutral(value):
    """Returns a state in the form of the independent reader."""
    if isinstance(value, torch.Tensor) and (inner := tensors_in(value)):
        return neutral_composite(value, {key: neutral(one) for key, one in inner.items()})
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return Tensor("tensor", dtype, tuple(value.shape), tensor_bytes(value))
    if isinstance(value, np.ndarray):
        name = value.dtype.name
        if name not in PLAIN_DTYPES or not value.dtype.isnative:
            name = f"numpy:{value.dtype.str}"
        return Tensor("ndarray", name, value.shape, value.tobytes())
    if isinstance(value, torch.Size):
        return Other("size", tuple(value))
    if isinstance(value, torch.dtype):
        return Other("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Other("device", str(value))
    if isinstance(value, np.dtype):
        return Other("np.dtype", value.str)
    if isinstance(value, np.str_):
        data = value.encode("utf-32-le", "surrogatepass")
        return Other("np", (f"<U{len(value)}", data))
    if isinstance(value, np.bytes_):
        return Other("np", (f"|S{len(value)}", bytes(value)))
    if isinstance(value, np.generic):
        return Other("np", (value.dtype.str, np.asarray(value).tobytes()))
    if isinstance(value, dict):
        return neutral_dict(value)
    if type(value) in (list, tuple):
        return type(value)(map(neutral, value))
    if type(value) is deque:
        return deque(map(neutral, value), value.maxlen)
    return value


def neutral_composite(value, inner):
    if value.layout is torch.jagged:
        bounds = {"max": value._maybe_max_seqlen, "min": value._maybe_min_seqlen}
        known = {key: bound for key, bound in bounds.items() if bound is not None}
        return Other("jagged", ({**known, "ragged": value._ragged_idx}, inner))
    if value.is_nested:
        return Other("nested", ({"sizes": value._nested_tensor_size().tolist()}, inner))
    layout = str(value.layout).removeprefix("torch.sparse_")
    facts = {"layout": layout, "shape": list(value.shape)}
    if layout == "coo":
        facts = {"coalesced": value.is_coalesced(), **facts}
    return Other("sparse", (facts, inner))


def neutral_dict(value):
    items = {key: neutral(item) for key, item in value.items()}
    if type(value) is defaultdict:
        factory = value.default_factory
        return Other("defaultdict", ("none" if factory is None else factory.__name__, items))
    if type(value) is OrderedDict:
        items = OrderedDict(items)
        return Other("odict", (items, neutral(vars(value)))) if vars(value) else items
    return Counter(items) if type(value) is Counter else items


def assert_equal(one, other, path="state"):
    """Checks equality down to types and the bits of floats."""
    assert type(one) is type(other), f"{path}: {type(one)} is no {type(other)}"
    if isinstance(one, dict):
        assert list(map(plain_text, one)) == list(map(plain_text, other)), path
        for (key, mine), theirs in zip(one.items(), other.values(), strict=True):
            assert_equal(mine, theirs, f"{path}[{key!r}]")
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other), path
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_equal(mine, theirs, f"{path}[{index}]")
    elif isinstance(one, set | frozenset):
        assert sorted(map(plain_text, one)) == sorted(map(plain_text, other)), path
    else:
        assert plain_text(one) == plain_text(other), f"{path}: {one!r} != {other!r}"


@pytest.fixture
def checkpoint(tmp_path):
    """Saves a checkpoint of several files, chunks, ties and tags."""
    state = {
        "big": torch.arange(300_000, dtype=torch.int32),
        "half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        "complex": torch.tensor([1 - 2j, 3j], dtype=torch.complex128),
        "text": np.array(["a", "bcd"]),
        "nested": {1: (torch.eye(3), None)},
    }
    state["again"] = state["big"][10:20]
    options = penstock.Options(shard_bytes=1 << 20)
    penstock.save(tmp_path / "ckpt", state, step=12, metadata={"a": [1]}, options=options)
    return tmp_path / "ckpt", state


# The reader itself.


def test_the_reader_uses_nothing_but_the_standard_library():
    tree = ast.parse(Path(format_reader.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported <= sys.stdlib_module_names


def test_2_1_the_check_value_of_the_digest():
    assert digest(b"123456789") == "crc64nvme:ae8b14860a799888"
    assert crc64(b"") == 0


# Paragraphs.


def test_1_1_and_1_2_names_of_files(checkpoint):
    path, _ = checkpoint
    manifest = json.loads((path / "manifest.json").read_bytes())
    attempt = manifest["id"]
    shards = len(json.loads((path / f"part-00000.{attempt}.json").read_bytes())["files"])
    assert shards >= 2
    assert {file.name for file in path.iterdir()} == {
        "manifest.json",
        f"part-00000.{attempt}.json",
        *(f"shard-00000-{index:02}.{attempt}.safetensors" for index in range(shards)),
    }


def test_1_3_files_that_nothing_names_are_not_looked_at(checkpoint):
    path, state = checkpoint
    for name in (
        "notes.txt",
        f"manifest.{'0' * 32}.tmp",
        f"part-00000.{'0' * 32}.json",
        f"shard-00000-00.{'0' * 32}.safetensors",
    ):
        (path / name).write_bytes(b"leftover")
    assert_same(penstock.load(path), state)
    assert penstock.verify(path).ok
    assert_equal(Checkpoint(path).state(), neutral(state))


def test_1_5_a_store_is_a_directory_of_steps(tmp_path):
    penstock.CheckpointStore(tmp_path).save(42, {"x": 1})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "history.jsonl",
        "step-0000000042",
    ]


def test_2_2_chunks_count_from_the_start_of_the_file(checkpoint):
    path, _ = checkpoint
    for file in Checkpoint(path).part["files"]:
        data = (path / file["name"]).read_bytes()
        parts = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        assert file["chunks"] == [f"{crc64(part):016x}" for part in parts]
        assert file["digest"] == digest(data)


def test_2_3_every_file_is_covered_by_a_digest(checkpoint):
    path, _ = checkpoint
    reader = Checkpoint(path)
    covered = {"manifest.json", reader.manifest["parts"][0]["file"]}
    covered |= {file["name"] for file in reader.part["files"]}
    assert covered == {file.name for file in path.iterdir()}


def test_3_1_members_of_the_manifest(checkpoint):
    path, _ = checkpoint
    text = (path / "manifest.json").read_bytes()
    manifest = json.loads(text)
    assert list(manifest) == [
        *("format", "version", "id", "step", "created", "writer", "world_size", "parts"),
        *("metadata", "digest"),
    ]
    assert (manifest["format"], manifest["version"]) == ("penstock-checkpoint", 1)
    assert (manifest["step"], manifest["world_size"]) == (12, 1)
    assert manifest["metadata"] == {"a": [1]}
    assert list(manifest["parts"][0]) == ["rank", "file", "bytes", "digest"]
    assert text.endswith(b"}\n")


def test_3_2_the_seal_covers_every_byte_before_it(checkpoint):
    path, _ = checkpoint
    text = (path / "manifest.json").read_bytes()
    stamp = f',"digest":"{digest(text[: -format_reader.STAMP_BYTES])}"}}\n'.encode()
    assert text.endswith(stamp)
    assert len(stamp) == format_reader.STAMP_BYTES


def test_3_2_the_document_tells_the_length_of_the_seal():
    text = (REPOSITORY / "docs" / "format.md").read_text()
    paragraph = text[text.index("\n3.2 ") : text.index("\n3.3 ")]
    assert f"{format_reader.STAMP_BYTES} bytes" in paragraph


def test_3_3_a_newer_format_is_not_damage(checkpoint):
    path, _ = checkpoint
    (path / "manifest.json").write_text('{"format":"penstock-checkpoint","version":9,"x":1}')
    with pytest.raises(FormatVersionError) as raised:
        penstock.load(path)
    assert (raised.value.found, raised.value.supported) == (9, 1)


def test_3_4_members_that_are_not_known_are_ignored(checkpoint):
    path, state = checkpoint
    forgery = Forgery(path)
    forgery.manifest["added_later"] = {"x": 1}
    forgery.part["added_later"] = [1]
    forgery.part["tensors"][0]["added_later"] = 1
    forgery.part["files"][0]["added_later"] = None
    forgery.write_part()
    assert_same(penstock.load(path), state)
    assert_equal(Checkpoint(path).state(), neutral(state))


def test_3_5_a_checkpoint_of_several_ranks_has_a_part_for_each(checkpoint):
    path, _ = checkpoint
    forgery = Forgery(path)
    members = {
        **forgery.part,
        "rank": 1,
        "files": [],
        "tensors": [],
        "aliases": [],
        "tree": {"b": 2},
    }
    text = encode(members) + b"\n"
    second = {**forgery.manifest["parts"][0], "rank": 1, "bytes": len(text), "digest": digest(text)}
    second["file"] = second["file"].replace("part-00000", "part-00001")
    (path / second["file"]).write_bytes(text)
    forgery.manifest["parts"].append(second)
    forgery.manifest["world_size"] = 2
    forgery.write_manifest()
    assert penstock.verify(path).ok
    assert penstock.inspect(path).world_size == 2
    assert penstock.load(path, rank=1) == {"b": 2}
    assert set(penstock.load(path)) == set(penstock.load(path, rank=2))


def test_4_1_members_of_the_part(checkpoint):
    path, _ = checkpoint
    part = Checkpoint(path).part
    assert list(part) == [
        *("format", "version", "id", "rank", "files", "tensors", "aliases", "tree"),
    ]
    assert set(part["files"][0]) == {"name", "bytes", "digest", "chunk_bytes", "chunks"}


def test_4_2_elements_are_row_major_and_little_endian(tmp_path):
    value = torch.arange(6, dtype=torch.int32).reshape(2, 3).t()
    penstock.save(tmp_path / "ckpt", {"t": value})
    tensor = Checkpoint(tmp_path / "ckpt").tensor("t")
    assert tensor.data == struct.pack("<6i", 0, 3, 1, 4, 2, 5)
    assert (tensor.shape, tensor.values()) == ((3, 2), [0, 3, 1, 4, 2, 5])


def test_4_3_and_4_4_the_values_of_elements(checkpoint):
    path, _ = checkpoint
    reader = Checkpoint(path)
    assert reader.tensor("half").values() == [1.5, -2.25]
    assert reader.tensor("complex").values() == [1 - 2j, 3j]
    assert reader.tensor("big").values()[:3] == [0, 1, 2]
    assert reader.tensor("text").data.decode("utf-32-le") == "a\0\0bcd"


def test_4_5_views_are_windows_over_a_tensor(tmp_path):
    base = np.arange(6)
    penstock.save(tmp_path / "ckpt", {"base": base, "backward": base[::-2], "same": base})
    reader = Checkpoint(tmp_path / "ckpt")
    assert reader.part["aliases"] == [
        {"name": "backward", "tensor": 0, "view": {"shape": [3], "strides": [-2], "offset": 5}},
        {"name": "same", "tensor": 0},
    ]
    assert reader.state()["backward"].values() == [5, 3, 1]


def test_4_6_a_tensor_with_a_box_is_refused(checkpoint):
    path, _ = checkpoint
    forgery = Forgery(path)
    forgery.part["tensors"][0]["box"] = [[0, 1]]
    forgery.write_part()
    with pytest.raises(FormatError, match=r"4\.6"):
        Checkpoint(path)
    with pytest.raises(penstock.PenstockError):
        penstock.load(path)


def test_4_6_a_box_is_that_of_a_global_tensor(checkpoint):
    path, _ = checkpoint
    forgery = Forgery(path)
    entry = forgery.part["tensors"][0]
    shape = entry["shape"]
    entry["box"] = {"tensor": "w", "shape": [dim + 1 for dim in shape], "start": [1] * len(shape)}
    forgery.write_part()
    assert penstock.verify(path).ok
    entry["box"]["shape"] = shape
    forgery.write_part()
    assert not penstock.verify(path).ok


def test_5_1_headers_and_parts_agree(checkpoint):
    path, _ = checkpoint
    reader = Checkpoint(path)
    listed = {}
    for row in reader.part["tensors"]:
        natural = {"dtype": format_reader.NATURAL.get(row["dtype"], (0, ""))[1]}
        stored = row.get("stored", {**natural, "shape": row["shape"]})
        name = row.get("stored_name", row["name"])
        listed[name] = (row["file"], *row["range"], stored["dtype"], stored["shape"])
    found = {}
    for index in range(len(reader.shards)):
        start, header = reader.header(index)
        for name, row in header.items():
            if name != "__metadata__":
                first, after_last = (start + offset for offset in row["data_offsets"])
                found[name] = (index, first, after_last, row["dtype"], row["shape"])
    assert found == listed


def test_5_2_data_starts_on_a_page(checkpoint):
    path, _ = checkpoint
    reader = Checkpoint(path)
    for index in range(len(reader.shards)):
        start, header = reader.header(index)
        assert start % 4096 == 0
        assert header["__metadata__"] == {"format": "pt", "penstock": "1"}


def test_5_2_a_shard_tells_which_of_its_tensors_are_boxes(tmp_path):
    path = three_ranks.commit(tmp_path / "ckpt", ["{}"] * 3)
    for rank in range(3):
        part = json.loads(three_ranks.file_of(path, "part", rank).read_bytes())
        expected = {row["name"]: row["box"] for row in part["tensors"] if "box" in row}
        assert "own" in [row["name"] for row in part["tensors"]]
        shard = three_ranks.file_of(path, "shard", rank)
        assert boxes_of_shard(shard) == expected
        # As other tools see it.
        with safe_open(shard, "np") as opened:
            assert json.loads(opened.metadata()["penstock.boxes"]) == expected
    three_ranks.commit(tmp_path / "plain", ["{}"] * 3, boxes=False)
    assert boxes_of_shard(three_ranks.file_of(tmp_path / "plain", "shard", 1)) is None


def test_5_3_tensors_are_ordered_by_alignment(tmp_path):
    state = {
        "byte": torch.zeros(3, dtype=torch.uint8),
        "double": torch.zeros(3, dtype=torch.float64),
        "half": torch.zeros(3, dtype=torch.float16),
        "line": torch.zeros(64, dtype=torch.uint8),
        "page": torch.zeros(4096, dtype=torch.uint8),
    }
    penstock.save(tmp_path / "ckpt", state)
    rows = Checkpoint(tmp_path / "ckpt").part["tensors"]
    ordered = sorted(rows, key=lambda row: row["range"])
    assert [row["name"] for row in ordered] == ["page", "line", "double", "half", "byte"]
    for row in rows:
        assert row["range"][0] % state[row["name"]].element_size() == 0


def test_6_4_names_are_unique_and_say_where_a_leaf_is(tmp_path):
    state = {"a": [torch.zeros(1), {2: torch.zeros(1)}], "a.0": torch.zeros(1)}
    penstock.save(tmp_path / "ckpt", state)
    names = [row["name"] for row in Checkpoint(tmp_path / "ckpt").part["tensors"]]
    assert names == ["a.0", "a.1.2", "a.0~2"]


@settings(
    max_examples=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(state=states())
def test_6_the_reader_agrees_on_any_state(tmp_path, state):
    path = tmp_path / "ckpt"
    penstock.save(path, state, overwrite=True)
    assert_equal(Checkpoint(path).state(), neutral(state))


def test_the_reader_agrees_on_a_checkpoint_of_all_kinds(checkpoint):
    path, state = checkpoint
    assert_equal(Checkpoint(path).state(), neutral(state))


def test_the_reader_finds_any_flipped_byte(tmp_path):
    path = tmp_path / "ckpt"
    penstock.save(path, {"w": torch.arange(50), "x": [1.5, "a"]})
    for file in list(path.iterdir()):
        good = file.read_bytes()
        for position in range(0, len(good), max(1, len(good) // 40)):
            file.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
            with pytest.raises(FormatError):
                Checkpoint(path)
        file.write_bytes(good)


# Golden files.

GOLDEN_CHECKPOINTS = sorted(path for path in GOLDEN.glob("v*/*") if path.is_dir())


def test_golden_files_are_there():
    assert {path.name for path in GOLDEN_CHECKPOINTS} >= set(make.STATES)


@pytest.mark.parametrize("path", GOLDEN_CHECKPOINTS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_a_golden_checkpoint_loads(path):
    assert_same(penstock.load(path), make.STATES[path.name]())


@pytest.mark.parametrize("path", GOLDEN_CHECKPOINTS, ids=lambda path: path.name)
def test_a_golden_checkpoint_verifies(path):
    result = penstock.verify(path)
    assert result.ok, result.problems


@pytest.mark.parametrize("path", GOLDEN_CHECKPOINTS, ids=lambda path: path.name)
def test_a_golden_checkpoint_tells_about_itself(path):
    info = penstock.inspect(path)
    assert (info.step, info.metadata) == (7, {"golden": path.name})
    assert info.format_version == 1


@pytest.mark.parametrize("path", GOLDEN_CHECKPOINTS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_a_golden_checkpoint_loads_with_the_tiny_reader(path):
    assert_equal(Checkpoint(path).state(), neutral(make.STATES[path.name]()))


@pytest.mark.parametrize("path", GOLDEN_CHECKPOINTS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_a_golden_checkpoint_loads_from_a_read_only_copy(tmp_path, path):
    copy = shutil.copytree(path, tmp_path / "copy")
    for file in copy.iterdir():
        file.chmod(0o444)
    assert_same(penstock.load(copy), make.STATES[path.name]())
