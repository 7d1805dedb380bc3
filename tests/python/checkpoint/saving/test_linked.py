"""Tensors in files are saved by a hard link to the file, without writing their bytes."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path

import pytest
import torch

import penstock
from compare import assert_same
from format_reader import Checkpoint
from held_files import Held
from penstock.errors import CorruptCheckpointError, UnsupportedStateError


def values():
    generator = torch.Generator().manual_seed(3)
    return {
        "first": torch.randn(300, 1000, generator=generator),
        "second": torch.randn(500, generator=generator).to(torch.bfloat16),
        "nobody's": torch.arange(77),
        "scalar": torch.tensor(5.0),
        "empty": torch.empty(0, 3),
    }


def make(tmp_path):
    return Held(tmp_path / "moments", values())


def state_of(held):
    """Returns a state of memory and files, and the state that it is loaded as."""
    weights = torch.arange(5000.0)
    found = values()
    first = held.tensor("first")
    state = {
        "weights": weights,
        "moments": [first, (held.tensor("second"), {"scalar": held.tensor("scalar")})],
        "again": first,
        "empty": held.tensor("empty"),
        "view": weights[3:7],
    }
    expected = {
        "weights": weights,
        "moments": [found["first"], (found["second"], {"scalar": found["scalar"]})],
        "again": found["first"],
        "empty": found["empty"],
        "view": weights[3:7],
    }
    return state, expected


def inodes(path):
    return {file.stat().st_ino for file in Path(path).iterdir()}


def test_a_file_is_linked(tmp_path):
    held = make(tmp_path)
    state, expected = state_of(held)
    report = penstock.save(tmp_path / "c", state)
    assert_same(penstock.load(tmp_path / "c"), expected)
    assert os.stat(held.path).st_ino in inodes(tmp_path / "c")
    assert report.linked_bytes == held.nbytes
    files = [file.stat().st_size for file in (tmp_path / "c").iterdir()]
    assert (report.bytes + report.linked_bytes, report.files) == (sum(files), len(files))
    assert report.tensors == 5
    assert penstock.verify(tmp_path / "c").ok
    # Its owner drops it.
    del state, held
    gc.collect()
    assert not os.path.exists(tmp_path / "moments")
    assert_same(penstock.load(tmp_path / "c"), expected)


def test_the_format_says_where_it_is(tmp_path):
    held = make(tmp_path)
    state, _ = state_of(held)
    penstock.save(tmp_path / "c", state)
    reader = Checkpoint(tmp_path / "c")
    names = {row["name"]: row.get("stored_name") for row in reader.part["tensors"]}
    assert names == {
        "weights": None,
        "moments.0": "first",
        "moments.1.0": "second",
        "moments.1.1.scalar": "scalar",
        "empty": None,
    }
    assert reader.state()["moments"][0].data == reader.tensor("moments.0").data


def test_names_are_given_once(tmp_path):
    held = make(tmp_path)
    state = {"a": {"b": held.tensor("first")}, "a.b": torch.ones(3), "c": held.tensor("second")}
    penstock.save(tmp_path / "c", state)
    assert_same(
        penstock.load(tmp_path / "c"),
        {"a": {"b": values()["first"]}, "a.b": torch.ones(3), "c": values()["second"]},
    )
    names = [tensor.name for tensor in penstock.inspect(tmp_path / "c").tensors]
    assert sorted(names) == ["a.b", r"a\.b", "c"]


def test_it_is_shown_as_any_tensor(tmp_path):
    held = make(tmp_path)
    state, expected = state_of(held)
    penstock.save(tmp_path / "c", state)
    penstock.save(tmp_path / "plain", expected)
    info, plain = penstock.inspect(tmp_path / "c"), penstock.inspect(tmp_path / "plain")
    shown = {tensor.name: (tensor.dtype, tensor.shape) for tensor in info.tensors}
    assert shown == {tensor.name: (tensor.dtype, tensor.shape) for tensor in plain.tensors}
    assert info.tensor_bytes == plain.tensor_bytes
    assert_same(
        penstock.load(tmp_path / "c", keys=["moments.*"]),
        penstock.load(tmp_path / "plain", keys=["moments.*"]),
    )


@pytest.mark.parametrize("lazy", [False, True])
def test_a_save_in_the_background_holds_the_file(tmp_path, lazy):
    held = make(tmp_path)
    store = penstock.CheckpointStore(tmp_path / "store", keep_last=1)
    state, expected = state_of(held)
    path = held.path
    pending = store.save_async(1, state, lazy=lazy)
    del state, held
    assert pending.result().linked_bytes > 0
    gc.collect()
    assert not os.path.exists(path), "nobody needs it any more, though the save is at hand"
    assert_same(store.load(), expected)


def test_steps_share_a_file(tmp_path):
    held = make(tmp_path)
    store = penstock.CheckpointStore(tmp_path / "store", keep_last=2)
    state, expected = state_of(held)
    for step in (1, 2, 3):
        store.save(step, state)
    store.save(3, state, overwrite=True)
    assert store.steps() == [2, 3]
    store.delete(2)
    assert_same(store.load(), expected)
    assert store.scrub().ok
    assert torch.equal(held.tensor("first").read(), expected["moments"][0])


def test_a_damaged_one_is_found_and_salvaged(tmp_path):
    held = make(tmp_path)
    state, expected = state_of(held)
    penstock.save(tmp_path / "c", state)
    bytes_before = Path(held.path).read_bytes()
    weights = next((tmp_path / "c").glob("shard-00000-00.*"))
    data = bytearray(weights.read_bytes())
    data[5000] ^= 1
    weights.write_bytes(data)
    assert not penstock.verify(tmp_path / "c").ok
    report = penstock.salvage(tmp_path / "c", tmp_path / "out")
    assert [lost.name for lost in report.missing] == ["weights", "view"]
    found = penstock.load(tmp_path / "out", allow_partial=True)
    assert_same(found["moments"], expected["moments"])
    assert os.stat(held.path).st_ino not in inodes(tmp_path / "out")
    assert Path(held.path).read_bytes() == bytes_before


def test_a_file_that_is_not_what_it_was_is_refused(tmp_path):
    held = make(tmp_path)
    state, _ = state_of(held)
    with open(held.path, "ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptCheckpointError, match="moments"):
        penstock.save(tmp_path / "c", state)
    assert not (tmp_path / "c").exists()


def test_a_file_elsewhere_is_copied(tmp_path):
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no other file system is at hand")
    path = Path("/dev/shm") / f"penstock-test-{os.getpid()}"
    elsewhere = Held(path, values())
    report = penstock.save(tmp_path / "c", {"moment": elsewhere.tensor("first")})
    assert_same(penstock.load(tmp_path / "c"), {"moment": values()["first"]})
    assert report.linked_bytes == 0
    assert [fallback.kind for fallback in report.fallbacks if "copied" in fallback] == ["unlinked"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=path.name):
        penstock.save(tmp_path / "d", {"moment": elsewhere.tensor("first")})
    assert not (tmp_path / "d").exists()


def test_what_cannot_be_stored_is_named(tmp_path):
    held = make(tmp_path)
    tensor = held.tensor("first")
    with pytest.raises(UnsupportedStateError, match="a set of tensors"):
        penstock.save(tmp_path / "c", {"s": {tensor}})
    tensor.dtype = torch.quint8
    with pytest.raises(UnsupportedStateError, match=r"x: .*quint8"):
        penstock.save(tmp_path / "c", {"x": tensor})


def test_pickled_it_is_its_tensor(tmp_path):
    tensor = make(tmp_path).tensor("second")
    found = pickle.loads(pickle.dumps(tensor))
    assert torch.equal(found, values()["second"])
