"""Damage and hostile input: the named error, and nothing worse.

Never a panic, never another kind of exception, never data that was not saved; stored checkpoints
stay unchanged.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import shutil
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from compare import assert_same
from conftest import mounted, run_child, tell
from forge import Forgery, encode
from format_reader import CHUNK_BYTES
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    MissingDependencyError,
    StateMismatchError,
    StorageError,
)

pytestmark = pytest.mark.quick

SEED = 1_986
FLIPS = 100


def make_state():
    generator = torch.Generator().manual_seed(SEED)
    state = {
        f"layer.{i}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for i, size in enumerate((1 << 21, 1 << 20, 700_001, 4096, 130, 7))
    }
    state["view"] = state["layer.3"][5:9]
    state["plain"] = {"step": 3, "text": "ü", 1: (1.5, None)}
    return state


@pytest.fixture
def state():
    return make_state()


@pytest.fixture
def path(tmp_path, state):
    """Saves a checkpoint of several shards."""
    options = penstock.Options(shard_bytes=1 << 20)
    penstock.save(tmp_path / "ckpt", state, step=5, options=options)
    return tmp_path / "ckpt"


@pytest.fixture
def small(tmp_path):
    """Saves a checkpoint of one small shard, which is quick to forge."""
    state = {"a": torch.arange(6.0), "b": np.array(["x", "yz"]), "c": torch.arange(4)}
    state["t"] = state["a"][1:3]
    penstock.save(tmp_path / "small", state)
    return tmp_path / "small"


def is_whole(error):
    """Whether a Penstock error has a specific class, and is not an internal error."""
    return type(error) is not penstock.PenstockError and "internal error" not in str(error)


@contextmanager
def harmless(*kinds):
    """Allows only errors of these kinds, and no internal ones."""
    try:
        yield
    except kinds as error:
        if not is_whole(error):
            raise


def load_error(path, **arguments):
    with pytest.raises(penstock.PenstockError) as raised:
        penstock.load(path, **arguments)
    assert is_whole(raised.value), raised.value
    assert str(path) in str(raised.value)
    return raised.value


def assert_corrupt(path, file=None):
    """Checks that every reader reports damage; returns the error of `load`."""
    error = load_error(path)
    assert type(error) is CorruptCheckpointError
    assert error.path == str(path)
    result = penstock.verify(path)
    assert not result.ok
    if file is not None:
        assert error.file == file
        assert file in {problem.file for problem in result.problems}
    return error


def flip(file, position):
    with open(file, "r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ (1 << random.randrange(8))]))


# One flipped byte anywhere.


def positions(path):
    """Draws bytes of a checkpoint: anywhere, and some in every file, however small."""
    tell("seed", SEED)
    random.seed(SEED)
    files = sorted(path.iterdir())
    chosen = [(file, random.randrange(file.stat().st_size)) for file in files for _ in range(8)]
    sizes = [file.stat().st_size for file in files]
    while len(chosen) < FLIPS:
        file = random.choices(files, sizes)[0]
        chosen.append((file, random.randrange(file.stat().st_size)))
    return chosen


def flipped_copies(path):
    """Yields a copy for each position with one bit flipped there, which is flipped back after."""
    for file, position in positions(path):
        good = file.read_bytes()
        flip(file, position)
        yield file, position
        file.write_bytes(good)


def tensors_in_chunk(info, file, position):
    begin = position // CHUNK_BYTES * CHUNK_BYTES
    return {
        tensor.name
        for tensor in info.tensors
        if tensor.file == file.name and tensor.begin < begin + CHUNK_BYTES and tensor.end > begin
    }


def assert_names(found, info, file, position):
    """Checks that a problem names the file, and for data the offset and a damaged tensor."""
    assert found.file == file.name
    if file.name.endswith(".safetensors"):
        hit = tensors_in_chunk(info, file, position)
        assert found.tensor in hit
        assert found.offset <= position < found.offset + CHUNK_BYTES


def test_verify_names_any_flipped_byte(path):
    info = penstock.inspect(path)
    found = 0
    for file, position in flipped_copies(path):
        result = penstock.verify(path)
        assert not result.ok, (file.name, position)
        matches = [p for p in result.problems if p.offset is not None or p.file == file.name]
        assert_names(matches[-1], info, file, position)
        assert all(problem.message for problem in result.problems)
        found += 1
    assert found == FLIPS
    assert penstock.verify(path).ok


def test_load_names_any_flipped_byte(path, options):
    info = penstock.inspect(path)
    found = 0
    for file, position in flipped_copies(path):
        with pytest.raises(CorruptCheckpointError) as raised:
            penstock.load(path, options=options)
        assert_names(raised.value, info, file, position)
        assert file.name in str(raised.value)
        found += 1
    assert found == FLIPS
    assert_same(penstock.load(path, options=options), make_state())


def test_the_tensor_that_holds_the_flipped_byte_is_named(tmp_path):
    """A digest covers a chunk; the message names all tensors in it."""
    state = {
        f"weights.{name}": torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
        for name in ("first", "second", "third")
    }
    path = tmp_path / "ckpt"
    penstock.save(path, state)
    row = penstock.inspect(path).tensors[1]
    flip(path / row.file, row.begin + CHUNK_BYTES // 2)
    assert "weights.second" in str(load_error(path))
    problem = penstock.verify(path).problems[0]
    assert "weights.second" in f"{problem.tensor} {problem.message}"


def test_damage_to_a_selection_names_what_was_asked_for(tmp_path):
    path = tmp_path / "ckpt"
    penstock.save(path, {f"t{i}": torch.zeros(64, dtype=torch.uint8) for i in range(4)})
    row = penstock.inspect(path).tensors[3]
    flip(path / row.file, row.begin)
    assert load_error(path, keys="t3").tensor == "t3"


def test_a_selection_without_the_damaged_bytes_still_loads(path, state):
    rows = {tensor.name: tensor for tensor in penstock.inspect(path).tensors}
    flip(path / rows["layer.0"].file, rows["layer.0"].end - 1)
    loaded = penstock.load(path, keys="layer.1")
    assert_same(loaded, {"layer.1": state["layer.1"]})


def test_damage_that_is_not_checked_is_reported_as_not_verified(path):
    rows = {tensor.name: tensor for tensor in penstock.inspect(path).tensors}
    flip(path / rows["layer.0"].file, rows["layer.0"].begin)
    reports = []
    options = penstock.Options(verify=False)
    loaded = penstock.load(path, options=options, report=reports.append)
    assert not reports[0].verified
    assert not torch.equal(loaded["layer.0"], make_state()["layer.0"])


def test_verify_lists_all_damage(path):
    rows = {tensor.name: tensor for tensor in penstock.inspect(path).tensors}
    for name in ("layer.0", "layer.1", "layer.2"):
        flip(path / rows[name].file, rows[name].end - 1)
    problems = penstock.verify(path).problems
    assert len(problems) == 3
    assert {problem.file for problem in problems} == {rows[f"layer.{i}"].file for i in range(3)}


# Files cut, lengthened, swapped, missing, foreign.


def files_of(path):
    return sorted(file.name for file in path.iterdir())


@pytest.mark.parametrize("kind", ["manifest", "part", "shard"])
@pytest.mark.parametrize("change", ["empty", "half", "one less", "one more", "twice"])
def test_a_file_of_another_length_is_named(path, kind, change):
    file = next(file for file in sorted(path.iterdir()) if file.name.startswith(kind))
    good = file.read_bytes()
    file.write_bytes(
        {
            "empty": b"",
            "half": good[: len(good) // 2],
            "one less": good[:-1],
            "one more": good + b"\0",
            "twice": good + good,
        }[change]
    )
    assert_corrupt(path, file.name)


@pytest.mark.parametrize("kind", ["part", "shard"])
@pytest.mark.parametrize("instead", ["nothing", "directory", "link", "dangling link", "fifo"])
def test_a_missing_file_is_named(path, kind, instead):
    file = next(file for file in sorted(path.iterdir()) if file.name.startswith(kind))
    outside = file.rename(path.parent / "outside")
    if instead == "directory":
        file.mkdir()
    elif instead == "link":
        file.symlink_to(outside)
    elif instead == "dangling link":
        file.symlink_to("nowhere")
    elif instead == "fifo":
        os.mkfifo(file)
    assert_corrupt(path, file.name)


def test_a_directory_without_manifest_is_incomplete(path):
    (path / "manifest.json").unlink()
    assert type(load_error(path)) is IncompleteCheckpointError
    for call in (penstock.verify, penstock.inspect):
        with pytest.raises((IncompleteCheckpointError, CorruptCheckpointError)):
            call(path)


def test_an_empty_directory_is_incomplete(tmp_path):
    assert type(load_error(tmp_path)) is IncompleteCheckpointError


def test_nothing_at_the_path_is_not_found(tmp_path):
    error = load_error(tmp_path / "no" / "where")
    assert type(error) is CheckpointNotFoundError
    assert isinstance(error, FileNotFoundError)
    for call in (penstock.verify, penstock.inspect):
        with pytest.raises(CheckpointNotFoundError):
            call(tmp_path / "nowhere")


@pytest.mark.parametrize("below", ["", "below"])
def test_a_path_that_is_a_file_is_named_and_stays(tmp_path, below):
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    path = file / below if below else file
    for call in (
        lambda: penstock.save(path, {"x": 1}),
        lambda: penstock.save(path, {"x": 1}, overwrite=True),
        lambda: penstock.load(path),
        lambda: penstock.verify(path),
        lambda: penstock.inspect(path),
    ):
        with pytest.raises((StorageError, CheckpointNotFoundError)) as raised:
            call()
        assert str(file) in str(raised.value)
        assert raised.value.errno in (errno.ENOTDIR, errno.ENOENT, errno.EEXIST)
    assert file.read_bytes() == b"precious"


FOREIGN = {
    "empty object": b"{}\n",
    "array": b"[]",
    "text": b"hello",
    "bytes": bytes(range(256)),
    "zeros": bytes(5000),
    "other format": b'{"format":"other","version":1}\n',
    "other format, newer": b'{"format":"other","version":2}\n',
    "no version": b'{"format":"penstock-checkpoint"}\n',
    "version of text": b'{"format":"penstock-checkpoint","version":"2"}\n',
    "hugging face": b'{"metadata":{"total_size":1},"weight_map":{}}',
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "huge number": b'{"format":"penstock-checkpoint","version":' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("text", list(FOREIGN.values()), ids=list(FOREIGN))
def test_a_foreign_manifest_is_damage(path, text):
    (path / "manifest.json").write_bytes(text)
    assert_corrupt(path, "manifest.json")


def test_a_newer_format_is_told_from_damage(path):
    forgery = Forgery(path)
    forgery.manifest["version"] = 2
    forgery.write_manifest()
    for call in (penstock.load, penstock.inspect, penstock.verify):
        with pytest.raises(FormatVersionError, match="that wrote it") as raised:
            call(path)
        assert (raised.value.found, raised.value.supported) == (2, 1)
        assert raised.value.path == str(path)


def test_a_shard_of_another_save_is_named(path, tmp_path, state):
    other = tmp_path / "other"
    options = penstock.Options(shard_bytes=1 << 20)
    changed = {**state, "layer.0": state["layer.0"] + 1}
    penstock.save(other, changed, options=options)
    mine = sorted(path.glob("shard-*"))[0]
    shutil.copy(sorted(other.glob("shard-*"))[0], mine)
    assert_corrupt(path, mine.name)


def test_two_swapped_shards_are_named(tmp_path):
    state = [torch.zeros(4096, dtype=torch.uint8), torch.ones(4096, dtype=torch.uint8)]
    path = tmp_path / "ckpt"
    penstock.save(path, state, options=penstock.Options(shard_bytes=4096))
    one, other = sorted(path.glob("shard-*"))
    one_bytes, other_bytes = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_bytes)
    other.write_bytes(one_bytes)
    assert_corrupt(path)


def test_a_manifest_of_another_save_is_damage(path, tmp_path):
    penstock.save(tmp_path / "other", {"x": 1})
    shutil.copy(tmp_path / "other" / "manifest.json", path / "manifest.json")
    assert_corrupt(path)


# Wrong contents under right digests.

EVIL_NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "",
    "manifest.json",
    "sub/part-00000.{id}.json",
    "../ckpt/part-00000.{id}.json",
    "part-00000.{id}.json\0",
    "part-00001.{id}.json",
    "part-0.{id}.json",
    "shard-00000-00.{id}.safetensors/../x",
    "shard-00001-00.{id}.safetensors",
    "shard-00000-0.{id}.safetensors",
    "shard-00000-000.{id}.safetensors",
    "shard-00000-00.00000000000000000000000000000000.safetensors",
    "/dev/zero",
]


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_a_part_of_another_name_is_never_opened(small, name):
    forgery = Forgery(small)
    forgery.manifest["parts"][0]["file"] = name.format(id=forgery.manifest["id"])
    forgery.write_manifest()
    assert_corrupt(small, "manifest.json")


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_a_shard_of_another_name_is_never_opened(small, name):
    forgery = Forgery(small)
    forgery.part["files"][0]["name"] = name.format(id=forgery.manifest["id"])
    forgery.write_part()
    assert_corrupt(small, forgery.part_file.name)


def change(*place, to):
    """Returns a change that puts a value at a place of the part."""

    def apply(part):
        for step in place[:-1]:
            part = part[step]
        part[place[-1]] = to

    return apply


def duplicate(name):
    def apply(part):
        part[name].append(copy.deepcopy(part[name][0]))

    return apply


BIG = 2**63
LIES = {
    "range beyond the file": change("tensors", 0, "range", to=[4096, 1 << 40]),
    "range of the largest numbers": change("tensors", 0, "range", to=[2**64 - 25, 2**64 - 1]),
    "range backwards": change("tensors", 0, "range", to=[4120, 4096]),
    "range of three": change("tensors", 0, "range", to=[0, 1, 2]),
    "range negative": change("tensors", 0, "range", to=[-1, 23]),
    "range of floats": change("tensors", 0, "range", to=[4096.0, 4120.0]),
    "range too short": change("tensors", 0, "range", to=[4096, 4100]),
    "overlap": duplicate("tensors"),
    "shape too large": change("tensors", 0, "shape", to=[7]),
    "shape overflows": change("tensors", 0, "shape", to=[2**62, 2**62]),
    "shape overflows to the size": change("tensors", 0, "shape", to=[2**63, 2, 6]),
    "shape negative": change("tensors", 0, "shape", to=[-6]),
    "shape of zero and much": change("tensors", 0, "shape", to=[0, 2**63, 2**63]),
    "file beyond the list": change("tensors", 0, "file", to=1),
    "file negative": change("tensors", 0, "file", to=-1),
    "dtype of code": change("tensors", 0, "dtype", to="numpy:O"),
    "dtype without carrier": change("tensors", 0, "dtype", to="complex128"),
    "carrier of another size": change("tensors", 0, "stored", to={"dtype": "U8", "shape": [6, 4]}),
    "carrier that overflows": change(
        "tensors", 1, "stored", to={"dtype": "U8", "shape": [2, 2**63]}
    ),
    "name missing": lambda part: part["tensors"][0].pop("name"),
    "name of a number": change("tensors", 0, "name", to=1),
    "name twice": change("tensors", 2, "name", to="a"),
    "no tensors": change("tensors", to={}),
    "file too long": change("files", 0, "bytes", to=1 << 40),
    "file of the largest number": change("files", 0, "bytes", to=2**64 - 1),
    "file negative length": change("files", 0, "bytes", to=-1),
    "file of another digest": change("files", 0, "digest", to="crc64nvme:" + "0" * 16),
    "file of another algorithm": change("files", 0, "digest", to="md5:00"),
    "chunks of nothing": change("files", 0, "chunk_bytes", to=0),
    "chunks of much": change("files", 0, "chunk_bytes", to=2**63),
    "chunks missing": change("files", 0, "chunks", to=[]),
    "chunks of much more": change("files", 0, "chunks", to=["0" * 16] * 20_000),
    "chunks of others": change("files", 0, "chunks", to=["0" * 16]),
    "alias of nothing": change("aliases", 0, "tensor", to=99),
    "alias outside": change("aliases", 0, "view", "offset", to=5),
    "alias far outside": change("aliases", 0, "view", "offset", to=2**64 - 1),
    "alias of much": change("aliases", 0, "view", "shape", to=[2**62]),
    "alias of strides that overflow": change("aliases", 0, "view", "strides", to=[2**63 - 1]),
    "alias backwards": change("aliases", 0, "view", "strides", to=[-2]),
    "alias of other dims": change("aliases", 0, "view", "strides", to=[1, 1]),
    "other attempt": change("id", to="0" * 32),
    "other rank": change("rank", to=1),
    "rank negative": change("rank", to=-1),
    "other format": change("format", to="penstock-checkpoint"),
    "other version": change("version", to=0),
}


@pytest.mark.parametrize("lie", list(LIES.values()), ids=list(LIES))
def test_numbers_that_lie_are_damage(small, lie):
    forgery = Forgery(small)
    lie(forgery.part)
    forgery.write_part()
    assert_corrupt(small, forgery.part_file.name)
    with pytest.raises(CorruptCheckpointError):
        penstock.inspect(small)


MANIFEST_LIES = {
    "world of none": {"world_size": 0},
    "world of many": {"world_size": 2**32 - 1},
    "world too large": {"world_size": 2**64},
    "no parts": {"parts": []},
    "parts of others": {"parts": [1]},
    "id of a path": {"id": "../../../../../../etc/passwd/aaaaa"},
    "id upper-case": {"id": "A" * 32},
    "step negative": {"step": -1},
    "step of text": {"step": "5"},
    "step too large": {"step": 2**64},
    "version nought": {"version": 0},
    "version negative": {"version": -1},
    "metadata of a list": {"metadata": []},
    "metadata of nothing": {"metadata": None},
}


@pytest.mark.parametrize("members", list(MANIFEST_LIES.values()), ids=list(MANIFEST_LIES))
def test_a_manifest_that_lies_is_damage(small, members):
    forgery = Forgery(small)
    forgery.manifest.update(members)
    forgery.write_manifest()
    assert_corrupt(small, "manifest.json")


@pytest.mark.parametrize("nbytes", [0, 1, 2**40, 2**64 - 1])
def test_a_part_of_another_length_is_never_read_whole(small, nbytes):
    forgery = Forgery(small)
    forgery.manifest["parts"][0]["bytes"] = nbytes
    forgery.write_manifest()
    assert_corrupt(small, forgery.part_file.name)


def test_metadata_nested_without_end_is_damage(small):
    forgery = Forgery(small)
    members = {k: v for k, v in forgery.manifest.items() if k not in ("metadata", "digest")}
    nested = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    forgery.write_manifest_text(encode(members)[:-1] + b',"metadata":' + nested)
    with pytest.raises(CorruptCheckpointError):
        penstock.inspect(small)


# The tree.

DEEP_LISTS = "[" * 129 + "]" * 129
TREES = {
    "unknown tag": '{"$":"pickle","v":"gASVAAAAAA=="}',
    "tag of a number": '{"$":1}',
    "tag of a list": '{"$":[]}',
    "tag of an object": '{"$":{"$":"int"}}',
    "tag of nothing": '{"$":null}',
    "tensor beyond the list": '{"$":"tensor","i":99}',
    "tensor negative": '{"$":"tensor","i":-1}',
    "tensor of a float": '{"$":"tensor","i":0.0}',
    "tensor of truth": '{"$":"tensor","i":true}',
    "tensor of text": '{"$":"tensor","i":"0"}',
    "tensor of nothing": '{"$":"tensor"}',
    "tensor of much": '{"$":"tensor","i":' + "9" * 400 + "}",
    "alias beyond the list": '{"$":"tensor","a":1}',
    "alias negative": '{"$":"ndarray","a":-1}',
    "bytes of a tensor": '{"$":"bytes","i":0}',
    "bytearray of nothing": '{"$":"bytearray","i":77}',
    "bytes not base64": '{"$":"bytes","v":"*"}',
    "bytes unpadded": '{"$":"bytes","v":"QQ"}',
    "bytes of a number": '{"$":"bytes","v":1}',
    "bytes beyond ascii": '{"$":"bytes","v":"ü"}',
    "int of words": '{"$":"int","v":"0xzz"}',
    "int of decimals": '{"$":"int","v":"12"}',
    "int of a number": '{"$":"int","v":12}',
    "int with underscores": '{"$":"int","v":"0x1_0"}',
    "float of words": '{"$":"float","v":"infinity"}',
    "float of few bits": '{"$":"float","v":"0x7ff"}',
    "text not UTF-8": '{"$":"str","v":"/w=="}',
    "complex of one": '{"$":"complex","v":[1.0]}',
    "complex of ints": '{"$":"complex","v":[1,2]}',
    "complex of text": '{"$":"complex","v":["1","2"]}',
    "tuple of an object": '{"$":"tuple","v":{}}',
    "tuple of nothing": '{"$":"tuple"}',
    "set of lists": '{"$":"set","v":[[]]}',
    "set of twins": '{"$":"set","v":[1,1]}',
    "set of equals": '{"$":"set","v":[1,true]}',
    "dict of singles": '{"$":"dict","v":[[1]]}',
    "dict of no pairs": '{"$":"dict","v":[1]}',
    "dict of an object": '{"$":"dict","v":{"a":1}}',
    "dict of list keys": '{"$":"dict","v":[[[],1]]}',
    "dict of object keys": '{"$":"dict","v":[[{},1]]}',
    "dict of tensor keys": '{"$":"dict","v":[[{"$":"tensor","i":0},1]]}',
    "dict of twins": '{"$":"dict","v":[[1,1],[1,2]]}',
    "dict of equals": '{"$":"dict","v":[[1,1],[1.0,2]]}',
    "repeated member": '{"a":1,"a":2}',
    "repeated tag": '{"$":"tuple","$":"set","v":[]}',
    "odict of attributes": '{"$":"odict","v":[],"attrs":{"__class__":1}}',
    "odict of more attributes": '{"$":"odict","v":[],"attrs":{"_metadata":1,"x":2}}',
    "odict of no attributes": '{"$":"odict","v":[],"attrs":[]}',
    "odict of empty attributes": '{"$":"odict","v":[],"attrs":{}}',
    "counter of an object": '{"$":"counter","v":{}}',
    "default of code": '{"$":"defaultdict","factory":"os.system","v":[]}',
    "default of eval": '{"$":"defaultdict","factory":"eval","v":[]}',
    "default of nothing": '{"$":"defaultdict","v":[]}',
    "default of a list": '{"$":"defaultdict","factory":["list"],"v":[]}',
    "size of text": '{"$":"size","v":["1"]}',
    "size of a number": '{"$":"size","v":3}',
    "dtype unknown": '{"$":"dtype","v":"float99"}',
    "dtype of a function": '{"$":"dtype","v":"load"}',
    "dtype of a path": '{"$":"dtype","v":"nn.Linear"}',
    "dtype of a number": '{"$":"dtype","v":1}',
    "device unknown": '{"$":"device","v":"toaster"}',
    "device of much": '{"$":"device","v":"cuda:99999999999999999999"}',
    "device that wraps around": '{"$":"device","v":"cuda:300"}',
    "device of nothing": '{"$":"device","v":""}',
    "numpy dtype of objects": '{"$":"np.dtype","v":"|O"}',
    "numpy dtype of fields": '{"$":"np.dtype","v":"i4,i8"}',
    "numpy dtype of code": '{"$":"np.dtype","v":"__import__"}',
    "numpy dtype of much": '{"$":"np.dtype","v":"<U999999999"}',
    "numpy dtype of odd size": '{"$":"np.dtype","v":"<f3"}',
    "numpy of objects": '{"$":"np","dtype":"|O","v":"AAAAAAAAAAA="}',
    "numpy of few bytes": '{"$":"np","dtype":"<f8","v":"AAA="}',
    "numpy of no bytes": '{"$":"np","dtype":"<f8","v":""}',
    "numpy text of no characters": '{"$":"np","dtype":"<U1","v":"/////w=="}',
    "numpy of a bad unit": '{"$":"np","dtype":"<M8[zz]","v":"AAAAAAAAAAA="}',
    "slice of two": '{"$":"slice","v":[1,2]}',
    "slice of text": '{"$":"slice","v":["a",null,null]}',
    "range of nothing": '{"$":"range","v":[]}',
    "range of no step": '{"$":"range","v":[0,1,0]}',
    "range of floats": '{"$":"range","v":[0.5,1,1]}',
    "not a number": "NaN",
    "infinity": "[Infinity]",
    "minus infinity": "[-Infinity]",
    "deep lists": DEEP_LISTS,
    "deeper lists": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 200 + "1" + "}" * 200,
    "deep tuples": '{"$":"tuple","v":[' * 5000 + "]}" * 5000,
    "deep keys": '{"$":"dict","v":[[' + '{"$":"tuple","v":[' * 500 + "]}" * 500 + ",1]]}",
    "deep attributes": '{"$":"odict","v":[],"attrs":{"_metadata":' * 200 + "1" + "}}" * 200,
    "deep complex": '{"$":"complex","v":[' * 300 + "1.0,1.0" + "]}" * 300,
}


NEWER = {
    "unknown tag",
    "odict of attributes",
    "odict of more attributes",
    "default of code",
    "default of eval",
    "numpy dtype of objects",
    "numpy dtype of fields",
    "numpy dtype of code",
    "numpy of objects",
}
"""Nodes that this version does not know, and another one may."""

LACKING = {
    "dtype unknown",
    "dtype of a function",
    "device unknown",
    "numpy dtype of much",
    "numpy dtype of odd size",
    "numpy of a bad unit",
}
"""Values that this PyTorch or NumPy does not support, and another one may."""


@pytest.mark.parametrize("what", list(TREES))
def test_a_tree_that_lies_is_no_state_and_no_damage(small, what):
    forgery = Forgery(small)
    forgery.write_tree(f'{{"x":{TREES[what]}}}')
    error = load_error(small)
    if what in NEWER:
        assert type(error) is FormatVersionError
    elif what in LACKING:
        assert type(error) is MissingDependencyError
    else:
        assert type(error) is CorruptCheckpointError
        assert error.file == forgery.part_file.name
        # Its digest is right.
        assert not error.is_proven


@pytest.mark.parametrize("tree", list(TREES.values()), ids=list(TREES))
@pytest.mark.parametrize("call", ["keys", "into", "values"])
def test_a_tree_that_lies_harms_no_other_call(small, tree, call):
    """Damage, or a mismatch; never another error, and the target is unchanged."""
    Forgery(small).write_tree(f'{{"x":{tree},"ok":1}}')
    target = {"x": torch.zeros(6), "ok": 5}
    with harmless(*REFUSALS, StateMismatchError):
        if call == "keys":
            penstock.load(small, keys=["x*"])
        elif call == "into":
            penstock.load(small, into=target)
        else:
            penstock.inspect(small).values()
    assert torch.equal(target["x"], torch.zeros(6))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000, "1" + "0" * 400 + ".5"])
def test_numbers_that_no_double_holds_raise_nothing_else(small, number):
    Forgery(small).write_tree(f'{{"x":{number}}}')
    with harmless(CorruptCheckpointError):
        assert set(penstock.load(small)) == {"x"}


@pytest.mark.parametrize("text", [b"\xff", b'"\xc3"', b"\x00", b"{", b'{"a"', b"tru"])
def test_a_tree_that_is_no_json_is_damage(small, text):
    forgery = Forgery(small)
    members = {key: value for key, value in forgery.part.items() if key != "tree"}
    forgery.write_part_text(encode(members)[:-1] + b',"tree":' + text + b"}\n")
    assert_corrupt(small, forgery.part_file.name)


REFUSALS = (
    CorruptCheckpointError,
    FormatVersionError,
    MissingDependencyError,
)

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.integers(), FLOATS)
    | st.sampled_from(["0x10", "nan", "<f4", "|V3", "list", "cpu", "float32", "AAAA", "QUI=", ""])
    | st.text(max_size=4),
    lambda nodes: st.one_of(
        st.lists(nodes, max_size=3),
        st.dictionaries(st.sampled_from(["a", "$", "v", "i"]), nodes, max_size=3),
        st.fixed_dictionaries(
            {
                "$": st.sampled_from(
                    [
                        *("tensor", "ndarray", "int", "float", "str", "bytes", "bytearray"),
                        *("complex", "tuple", "set", "frozenset", "dict", "odict", "counter"),
                        *("defaultdict", "size", "dtype", "device", "np.dtype", "np", "slice"),
                        "range",
                    ]
                )
            },
            optional={
                "v": nodes | st.lists(st.lists(nodes, min_size=2, max_size=2), max_size=3),
                "i": st.integers(-1, 4),
                "a": st.integers(-1, 2),
                "dtype": st.sampled_from(["<f4", "|V3", "<M8[s]", "|S2", "<U1", "|V0"]),
                "factory": st.sampled_from(["list", "none", "x"]),
                "attrs": st.fixed_dictionaries({"_metadata": nodes}),
            },
        ),
    ),
    max_leaves=8,
)


@settings(
    max_examples=400,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(tree=JSON)
def test_any_tree_loads_or_is_damage(small, tree):
    Forgery(small).write_tree(json.dumps(tree, allow_nan=False))
    for call in (
        lambda: penstock.load(small),
        lambda: penstock.load(small, keys="*"),
        lambda: penstock.inspect(small).values(),
    ):
        with harmless(*REFUSALS):
            call()


# Headers of shards.

HEADER_LIES = {
    "length beyond the file": lambda data: (2**40).to_bytes(8, "little") + data[8:],
    "largest length": lambda data: b"\xff" * 8 + data[8:],
    "no header": lambda data: bytes(8) + data[8:],
    "no JSON": lambda data: data[:8] + b"x" + data[9:],
    "another name": lambda data: data.replace(b'"a":{', b'"z":{', 1),
    "another type": lambda data: data.replace(b'"F32"', b'"I32"', 1),
    "another shape": lambda data: data.replace(b'"shape":[6]', b'"shape":[7]', 1),
    "another place": lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[1,', 1),
}


@pytest.mark.parametrize("lie", list(HEADER_LIES.values()), ids=list(HEADER_LIES))
def test_verify_finds_a_header_that_disagrees_with_the_part(small, lie):
    """5.4: other tools trust the header."""
    forgery = Forgery(small)
    good = forgery.shard_file().read_bytes()
    bad = lie(good)
    assert bad != good
    forgery.write_shard(bad)
    result = penstock.verify(small)
    assert not result.ok
    assert result.problems[0].file == forgery.shard_file().name


# Targets that do not fit.


def mismatches():
    return {
        "other shape": {"a": torch.zeros(7)},
        "other dims": {"a": torch.zeros(2, 3)},
        "other dtype": {"a": torch.zeros(6, dtype=torch.float64)},
        "same size, other dtype": {"a": torch.zeros(6, dtype=torch.int32)},
        "array of another dtype": {"b": np.zeros(2, "<U3")},
        "no tensor": {"a": 1.0},
        "nothing": {"a": None},
        "tensor for text": {"plain": torch.zeros(1)},
        "list for a dict": {"deep": []},
        "missing": {"a": "delete"},
        "one more": {"new": torch.zeros(1)},
        "read-only": {"b": np.frombuffer(bytes(16), "<U2")},
        "expanded": {"a": torch.zeros(1).expand(6)},
        "meta": {"a": torch.zeros(6, device="meta")},
        "sparse": {"a": torch.zeros(6).to_sparse()},
    }


@pytest.mark.parametrize("kind", list(mismatches()))
def test_a_target_that_does_not_fit_is_not_touched(tmp_path, kind):
    state = {
        "first": torch.ones(4),
        "a": torch.arange(6.0),
        "b": np.array(["x", "yz"]),
        "plain": "text",
        "deep": {"last": torch.ones(4)},
    }
    penstock.save(tmp_path / "ckpt", state)
    target = {
        "first": torch.zeros(4),
        "a": torch.zeros(6),
        "b": np.zeros(2, "<U2"),
        "plain": "before",
        "deep": {"last": torch.zeros(4)},
    }
    target.update(mismatches()[kind])
    if kind == "missing":
        del target["a"]
    elif kind == "read-only":
        target["b"].flags.writeable = False
    with pytest.raises(StateMismatchError) as raised:
        penstock.load(tmp_path / "ckpt", into=target)
    key = next(iter(mismatches()[kind]))
    assert raised.value.key.partition(".")[0] == key
    assert key in str(raised.value)
    assert torch.equal(target["first"], torch.zeros(4))
    if kind != "list for a dict":
        assert torch.equal(target["deep"]["last"], torch.zeros(4))
    assert target["plain"] == "before" or kind == "tensor for text"


def test_targets_that_share_memory_are_refused_where_the_checkpoint_has_two_tensors(tmp_path):
    penstock.save(tmp_path / "ckpt", [torch.ones(4), torch.zeros(4)])
    shared = torch.full((4,), 7.0)
    with pytest.raises(StateMismatchError, match="shares memory"):
        penstock.load(tmp_path / "ckpt", into=[shared, shared])
    assert (shared == 7).all()


def test_a_pattern_that_matches_nothing_names_what_does(small):
    with pytest.raises(StateMismatchError, match="matches") as raised:
        penstock.load(small, keys=["a", "zzz.*"])
    assert raised.value.key == "zzz.*"


# Errors of the operating system.


AS_NOBODY = """
    import json, os, sys
    import numpy as np, penstock
    # Imports lazy names first: other users may not be able to read the interpreter's files.
    _ = penstock.save, penstock.CheckpointStore
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    results = []
    for path in sys.argv[1:]:
        try:
            penstock.save(path, {"w": np.zeros(10_000)}, overwrite=True)
            results.append(None)
        except penstock.errors.StorageError as error:
            remedy = "check the owner" in str(error)
            results.append([error.errno, error.filename, isinstance(error, OSError), remedy])
    print(json.dumps(results))
"""


def test_a_directory_that_may_not_be_written_is_named(tmp_path, need_root):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o005 != 0o005 and parent.name.startswith("pytest"):
            parent.chmod(0o755)
    penstock.save(tmp_path / "ckpt", {"w": np.ones(10)})
    paths = [tmp_path / "new", tmp_path / "ckpt", tmp_path / "a" / "b"]
    results = run_child(AS_NOBODY, *paths)
    for path, (number, filename, is_os_error, has_remedy) in zip(paths, results, strict=True):
        assert number == errno.EACCES
        assert filename.startswith(str(path.parent if path.name == "b" else path))
        assert is_os_error
        assert has_remedy
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]
    assert_same(penstock.load(tmp_path / "ckpt"), {"w": np.ones(10)})


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("what", ["tensors", "tree"])
def test_a_full_disk_is_an_error_and_the_older_checkpoint_stays(tmp_path, need_root, kind, what):
    with mounted(kind, tmp_path / "disk", 24 << 20) as disk:
        store = penstock.CheckpointStore(disk / "store")
        store.save(1, {"w": np.arange(100_000)})
        files = {file.name for file in (disk / "store").rglob("*")}
        state = {"w": np.ones(40 << 20, np.uint8)} if what == "tensors" else ["x" * 1000] * 40_000
        with pytest.raises(StorageError, match="free space") as raised:
            store.save(2, state)
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.filename.startswith(str(disk))
        assert {file.name for file in (disk / "store").rglob("*")} == files
        assert_same(store.load(), {"w": np.arange(100_000)})
        assert store.save(3, {"w": np.arange(1000)}).step == 3


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_leaves_the_checkpoint_that_was_to_be_replaced(tmp_path, need_root, kind):
    with mounted(kind, tmp_path / "disk", 24 << 20) as disk:
        penstock.save(disk / "ckpt", {"w": np.arange(100_000)})
        with pytest.raises(StorageError) as raised:
            penstock.save(disk / "ckpt", {"w": np.ones(40 << 20, np.uint8)}, overwrite=True)
        assert raised.value.errno == errno.ENOSPC
        assert_same(penstock.load(disk / "ckpt"), {"w": np.arange(100_000)})
        assert penstock.verify(disk / "ckpt").ok


def test_a_read_only_file_system_is_named(tmp_path, need_root):
    with mounted("tmpfs", tmp_path / "disk", 8 << 20) as disk:
        penstock.save(disk / "ckpt", {"w": np.arange(10)})
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(StorageError) as raised:
            penstock.save(disk / "new", {"w": 1})
        assert raised.value.errno == errno.EROFS
        assert_same(penstock.load(disk / "ckpt"), {"w": np.arange(10)})
        store = penstock.CheckpointStore(disk)
        assert store.steps() == []
