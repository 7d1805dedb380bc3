"""Directories of ``torch_dist`` are input that may be wrong, and output that may fail."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import pickle
import resource
import sys
import zipfile

import pytest

import penstock
from archives import members, packed, saved
from penstock.errors import CorruptCheckpointError, StorageError, UnsupportedStateError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from penstock.checkpoint.converting.distributed.megatron import (  # noqa: E402
    COMMON_OBJECT,
    is_megatron,
    only_element,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def saved_bytes(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def objects_of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.fixture
def ours(tmp_path):
    """A checkpoint as the plug-in saves it, with tensors of 400 KB."""
    state = {
        "tensors": {"w": torch.arange(100_000.0), "b": torch.ones(3)},
        "objects": {"rng/shard_0_1": objects_of(saved_bytes({"seed": 1}))},
    }
    files = {"metadata.json": json.dumps(CONFIG).encode(), "common.pt": saved_bytes({"step": 1})}
    penstock.save(tmp_path / "ours", state, files=files)
    return tmp_path / "ours"


@pytest.fixture
def own(ours, tmp_path):
    """The same checkpoint as a directory of ``torch_dist``."""
    penstock.convert(ours, tmp_path / "own", to="megatron")
    return tmp_path / "own"


@contextlib.contextmanager
def files_of_at_most(nbytes):
    """Fails writes of this process beyond a size, as on a full disk.

    A compiled module that Python writes meanwhile would be cut, for every later process.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    keeps_modules, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = keeps_modules


@pytest.mark.parametrize("name", ["../secret", "{outside}", "sub/secret", "..", ""])
@pytest.mark.parametrize("kind", ["megatron", "dcp"])
def test_an_item_lies_in_a_file_of_the_directory_itself(own, tmp_path, kind, name):
    for secret in (tmp_path / "secret", own / "sub" / "secret"):
        secret.parent.mkdir(exist_ok=True)
        secret.write_bytes((own / "__0_0.distcp").read_bytes())
    name = name.format(outside=tmp_path / "secret")
    metadata = pickle.loads((own / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    (own / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata is cut or damaged") as caught:
        penstock.convert(own, tmp_path / "out", kind=kind)
    assert repr(name) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("nbytes", [100, 4_096, 300_000])
def test_a_full_disk_is_an_error_of_storage_and_can_be_repeated(ours, tmp_path, nbytes):
    path = tmp_path / "out"
    with files_of_at_most(nbytes), pytest.raises(StorageError, match="make room") as caught:
        penstock.convert(ours, path, to="megatron")
    assert caught.value.errno == errno.EFBIG
    assert list(path.iterdir()) == []
    penstock.convert(ours, path, to="megatron")
    assert penstock.convert(path, tmp_path / "again").tensors == 3


@pytest.mark.parametrize("name", ["metadata.json", "common.pt", ".metadata"])
def test_a_failure_after_the_data_files_leaves_none(ours, tmp_path, name):
    path = tmp_path / "out"

    def progress(_done, _total):
        (path / name).mkdir(exist_ok=True)

    with pytest.raises(StorageError, match=name):
        penstock.convert(ours, path, to="megatron", progress=progress)
    (path / name).rmdir()
    assert list(path.iterdir()) == []
    penstock.convert(ours, path, to="megatron")


def common(tmp_path, value, **arguments):
    return saved(tmp_path / "common.pt", value, **arguments)


def element_of(data):
    return only_element(objects_of(data), "a (common)")


@pytest.mark.parametrize("has_sums", [True, False])
def test_the_only_element_of_a_list_is_as_it_was_saved(has_sums):
    value = {"args": {"lr": 0.5}, "w": torch.arange(3.0)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(has_sums)
    try:
        data = saved_bytes([value])
    finally:
        torch.serialization.set_crc32_options(before)
    found = torch.load(io.BytesIO(element_of(data)))
    assert found["args"] == value["args"]
    assert torch.equal(found["w"], value["w"])


def assert_damaged(data, match):
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        element_of(data)
    assert caught.value.path == "a (common)"


def test_a_common_object_that_is_damaged_is_refused_by_name(tmp_path):
    content = members(common(tmp_path, [{"lr": 0.5}]))
    (name,) = (one for one in content if one.endswith("data.pkl"))
    assert_damaged(b"garbage" * 100, "it does not begin as one")
    assert_damaged(b"PK\x03\x04" + b"garbage" * 100, "not a zip file")
    path = tmp_path / "changed.pt"
    for pickled, why in ((b"\x80\x02]\xff.", "opcode"), (b"\x80\x02]q\0", "exhausted")):
        assert_damaged(packed(path, {**content, name: pickled}).read_bytes(), why)
    without = {one: data for one, data in content.items() if one != name}
    with pytest.raises(UnsupportedStateError, match=r"a \(common\).* no data\.pkl"):
        element_of(packed(path, without).read_bytes())
    for pickled in (b"\x80\x02.", pickle.dumps([1, 2], 2), pickle.dumps({}, 2)):
        with pytest.raises(UnsupportedStateError, match="no list of one element"):
            element_of(packed(path, {**content, name: pickled}).read_bytes())


def test_a_common_object_takes_no_more_memory_than_it_has_bytes(tmp_path):
    content = members(common(tmp_path, [{"lr": 0.5}]))
    (root,) = (one.removesuffix("data.pkl") for one in content if one.endswith("data.pkl"))
    large = {**content, f"{root}data/0": bytes(1 << 20)}
    bomb = {**content, f"{root}byteorder": bytes(1 << 20)}
    for packing, why in ((content, "is compressed"), (large, "compressed"), (bomb, "byte order")):
        path = packed(tmp_path / "deflated.pt", packing, zipfile.ZIP_DEFLATED)
        assert_damaged(path.read_bytes(), why)
    # Entries that share the bytes of one member.
    path = tmp_path / "shared.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for one, data in large.items():
            archive.writestr(one, data)
        entry = archive.getinfo(f"{root}data/0")
        for number in range(1, 4):
            name = f"{root}data/{number}"
            again = archive.NameToInfo[name] = zipfile.ZipInfo(name)
            again.header_offset = entry.header_offset
            again.CRC, again.file_size, again.compress_size = entry.CRC, 1 << 20, 1 << 20
            archive.filelist.append(again)
    assert_damaged(path.read_bytes(), "share bytes")


def test_a_damaged_common_object_of_a_checkpoint_is_refused(own, tmp_path):
    (own / "common.pt").unlink()
    metadata = pickle.loads((own / ".metadata").read_bytes())
    (index,) = (one for one in metadata.storage_data if one.fqn.startswith("rng"))
    place = metadata.storage_data.pop(index)
    metadata.storage_data[type(index)(COMMON_OBJECT)] = place
    entries = metadata.state_dict_metadata
    entries[COMMON_OBJECT] = entries.pop("rng/shard_0_1")
    place.length -= 50
    (own / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"own \(common\) is cut"):
        penstock.convert(own, tmp_path / "out")


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 200_000, b"\xff", b"9" * 10_000])
def test_a_config_that_no_parser_takes_is_none_of_megatrons(tmp_path, text):
    (tmp_path / "metadata.json").write_bytes(text)
    assert not is_megatron(tmp_path)


def test_only_the_start_of_a_large_config_is_read(tmp_path):
    text = json.dumps(CONFIG | {"more": "x" * (8 << 20)})
    (tmp_path / "metadata.json").write_text(text)
    assert not is_megatron(tmp_path)
