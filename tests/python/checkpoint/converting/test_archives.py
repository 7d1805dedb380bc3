"""Archives are read right or refused by name, whatever program packed their members."""

from __future__ import annotations

import random
import warnings
import zipfile
from typing import ClassVar

import numpy as np
import pytest

import penstock
from archives import members, packed, patched, saved
from penstock.errors import CorruptCheckpointError, UnsupportedStateError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from penstock.checkpoint.converting.files.pickles import Pickles  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state_of():
    weight = torch.arange(10_000.0).view(100, 100)
    return {
        "w": weight,
        "tied": weight,
        "row": weight[3],
        "half": torch.arange(7).bfloat16(),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "long": torch.tensor([1, -(1 << 40)]),
        "flag": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "epoch": 2,
    }


def assert_converted(source, path):
    penstock.convert(source, path)
    assert penstock.verify(path).ok
    found, expected = penstock.load(path), state_of()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name
    assert found["epoch"] == 2
    assert found["w"].data_ptr() == found["tied"].data_ptr()
    assert found["row"].data_ptr() == found["w"][3].data_ptr()


@pytest.mark.parametrize(
    "compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
@pytest.mark.parametrize("how", [{}, {"stream": True}, {"large": True}])
def test_an_archive_that_was_packed_anew_has_the_same_values(tmp_path, compression, how):
    content = members(saved(tmp_path / "a.pt", state_of()))
    packed(tmp_path / "b.pt", content, compression, **how)
    assert_converted(tmp_path / "b.pt", tmp_path / "b")


def test_members_that_lie_anywhere_have_the_same_values(tmp_path):
    content = members(saved(tmp_path / "a.pt", state_of()))
    for shift in range(1, 9):
        content = {"archive/pad": b"x" * shift, **content}
        packed(tmp_path / "b.pt", content)
        assert_converted(tmp_path / "b.pt", tmp_path / str(shift))
    # With entries for directories, as `zip -r` writes them, and one more directory level.
    deeper = {"up/": b"", **{f"up/{name}": data for name, data in content.items()}}
    assert_converted(packed(tmp_path / "c.pt", deeper), tmp_path / "c")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_bit_that_has_changed_is_noticed_in_compressed_members_too(tmp_path, compression):
    content = members(saved(tmp_path / "a.pt", {"w": torch.randn(1000)}))
    path = packed(tmp_path / "b.pt", content, compression)
    with zipfile.ZipFile(path) as archive:
        entry = next(one for one in archive.infolist() if one.filename.endswith("data/0"))
    data = bytearray(path.read_bytes())
    data[entry.header_offset + 30 + len(entry.filename) + entry.compress_size // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"b\.pt"):
        penstock.convert(path, tmp_path / "b", trust=True)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_has_changed_gives_the_same_values_or_an_error_of_ours(
    tmp_path, compression
):
    state = {"w": torch.arange(5.0), "more": [1, "text"]}
    packed(tmp_path / "a.pt", members(saved(tmp_path / "a.pt", state)), compression)
    written, chooser = (tmp_path / "a.pt").read_bytes(), random.Random(11)
    for _ in range(300):
        data = bytearray(written)
        for _ in range(chooser.randrange(1, 3)):
            data[chooser.randrange(len(data))] = chooser.randrange(256)
        (tmp_path / "b.pt").write_bytes(data)
        try:
            found = Pickles(trust=True).read(str(tmp_path / "b.pt"))
        except penstock.PenstockError:
            continue
        assert repr(found) == repr(state)


def test_an_archive_of_a_newer_version_of_zip_is_not_called_damaged(tmp_path):
    path = saved(tmp_path / "a.pt", {"w": torch.ones(2)})
    data = bytearray(path.read_bytes())
    # The "version needed" of the first member, in the archive's directory.
    data[data.index(b"PK\x01\x02") + 6] = 128
    path.write_bytes(data)
    with pytest.raises(UnsupportedStateError, match="newer version"):
        penstock.convert(path, tmp_path / "b")


def test_two_members_of_one_name_are_refused(tmp_path):
    content = members(saved(tmp_path / "a.pt", state_of()))
    name = next(one for one in content if one.endswith("data/0"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed(tmp_path / "b.pt", content, names=[name])
    with pytest.raises(CorruptCheckpointError, match="one name"):
        penstock.convert(tmp_path / "b.pt", tmp_path / "b")


def test_storages_that_are_missing_or_of_another_size_are_damage(tmp_path):
    content = members(saved(tmp_path / "a.pt", state_of()))
    name = next(one for one in content if one.endswith("data/0"))
    for change, told in (({}, "missing"), ({name: content[name][:-4]}, "instead of")):
        rest = {one: data for one, data in content.items() if one != name}
        packed(tmp_path / "b.pt", {**rest, **change})
        with pytest.raises(CorruptCheckpointError, match=told):
            penstock.convert(tmp_path / "b.pt", tmp_path / "b")


def test_what_cannot_be_unpacked_is_not_called_damaged(tmp_path):
    content = members(saved(tmp_path / "a.pt", state_of()))
    for change, told in (({"flags": 1}, "encrypted"), ({"method": 93}, "compression")):
        path = patched(packed(tmp_path / "b.pt", content, zipfile.ZIP_DEFLATED), **change)
        with pytest.raises(UnsupportedStateError, match=rf"{told}.*plain zip"):
            penstock.convert(path, tmp_path / "b", trust=True)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_storages_of_a_machine_of_the_other_byte_order_are_turned(tmp_path, compression):
    state = state_of()
    content = members(saved(tmp_path / "a.pt", state))
    sizes = (4, 2, 4, 8, 1)
    order = next(name for name in content if name.endswith("byteorder"))
    stored = sorted(name for name in content if "/data/" in name)
    for name, size in zip(stored, sizes, strict=False):
        items = np.frombuffer(content[name], np.uint8).reshape(-1, size)
        content[name] = items[:, ::-1].tobytes()
    content[order] = b"big"
    path = packed(tmp_path / "b.pt", content, compression)
    assert_converted(path, tmp_path / "b")
    content[order] = b"middle"
    with pytest.raises(CorruptCheckpointError, match="byte order"):
        penstock.convert(packed(tmp_path / "c.pt", content), tmp_path / "c")


def test_types_without_a_storage_of_their_own_are_refused_in_the_other_byte_order(tmp_path):
    kind = torch.float8_e4m3fn
    content = members(saved(tmp_path / "a.pt", {"w": torch.ones(4).to(kind)}))
    order = next(name for name in content if name.endswith("byteorder"))
    path = packed(tmp_path / "b.pt", {**content, order: b"big"})
    with pytest.raises(UnsupportedStateError, match="byte order of another machine"):
        penstock.convert(path, tmp_path / "b")


def test_archives_of_others_are_named_with_a_way(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, value):
            return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Model()), tmp_path / "script.pt")
    np.savez(tmp_path / "arrays.npz", a=np.ones(3))
    packed(tmp_path / "notes.zip", {"a.txt": b"hello"})
    for name, told in (
        ("script.pt", r"TorchScript.*torch\.jit\.load"),
        ("arrays.npz", r"NumPy.*numpy\.load"),
        ("notes.zip", r"zip archive.*none of torch\.save"),
    ):
        for trust in (True, False):
            with pytest.raises(UnsupportedStateError, match=told):
                penstock.convert(tmp_path / name, tmp_path / "a", trust=trust)


class TestOfOthers:
    """The reader of each directory format takes compressed files, and finds a flipped bit."""

    STATE: ClassVar = {"w": torch.arange(1000.0)}

    def compress(self, path):
        packed(path, members(path), zipfile.ZIP_DEFLATED)

    def test_lightning(self, tmp_path):
        state = {"pytorch-lightning_version": "2.6.6", "global_step": 3, "state_dict": self.STATE}
        self.compress(saved(tmp_path / "a.ckpt", state))
        assert penstock.convert(tmp_path / "a.ckpt", tmp_path / "a").kind == "lightning"
        assert torch.equal(penstock.load(tmp_path / "a")["state_dict"]["w"], self.STATE["w"])

    def test_deepspeed(self, tmp_path):
        path = tmp_path / "d" / "mp_rank_00_model_states.pt"
        path.parent.mkdir()
        self.compress(saved(path, {"module": self.STATE, "dp_world_size": 1, "mp_world_size": 1}))
        assert penstock.convert(tmp_path / "d", tmp_path / "a").kind == "deepspeed"
        found = penstock.load(tmp_path / "a")["mp_rank_00_model_states"]["module"]
        assert torch.equal(found["w"], self.STATE["w"])

    def test_accelerate(self, tmp_path):
        directory = tmp_path / "d"
        directory.mkdir()
        for name in ("pytorch_model.bin", "optimizer.bin", "random_states_0.pkl"):
            self.compress(saved(directory / name, self.STATE))
        assert penstock.convert(directory, tmp_path / "a").kind == "accelerate"
        for state in penstock.load(tmp_path / "a").values():
            assert torch.equal(state["w"], self.STATE["w"])

    def test_dcp(self, tmp_path):
        """PyTorch's own reader compares no checksums here."""
        dcp.save(dict(self.STATE), checkpoint_id=tmp_path / "d")
        file = tmp_path / "d" / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        at = data.index(self.STATE["w"].numpy().tobytes())
        data[at + 1000] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match="CRC"):
            penstock.convert(tmp_path / "d", tmp_path / "a")
        assert not (tmp_path / "a").exists()
