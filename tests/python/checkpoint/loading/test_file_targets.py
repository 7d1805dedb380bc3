"""Loads into tensors that are in files: each is read piece by piece into a new file."""

from __future__ import annotations

import gc
import os

import pytest
import torch

import penstock
from compare import assert_same
from held_files import Held, Target
from penstock.errors import CorruptCheckpointError, PenstockWarning, StateMismatchError
from penstock.tensors.file_tensor import FileTensor


def values(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "first": torch.randn(70, 5000, generator=generator),
        "second": torch.randn(501, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
    }


def state_of(found):
    """Returns a state around some tensors."""
    return {
        "weights": torch.arange(1000.0) if torch.is_tensor(found["scalar"]) else torch.zeros(1000),
        "moments": [found["first"], (found["second"], {"scalar": found["scalar"]})],
        "again": found["first"],
        "empty": found["empty"],
        "step": 3,
    }


def in_files(path, seed=2):
    held = Held(path, values(seed))
    return {label: held.tensor(label) for label in values()}


def read_all(state):
    """Reads the files of a state; tensors of one file stay tied."""
    known = {}

    def read(value):
        if isinstance(value, FileTensor):
            return known.setdefault(id(value), value.read())
        if isinstance(value, dict):
            return {key: read(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(read, value))
        return value

    return read(state)


@pytest.fixture
def saved(tmp_path):
    penstock.save(tmp_path / "c", state_of(values()))
    return tmp_path / "c"


def test_new_files_take_the_place_of_the_old_ones(tmp_path, saved):
    found = in_files(tmp_path / "own")
    state = state_of(found)
    weights, old = state["weights"], state["moments"][0]
    before = old.read()
    loaded = penstock.load(saved, into=state)
    assert loaded is state
    assert state["weights"] is weights
    assert_same(read_all(state), state_of(values()))
    assert state["again"] is state["moments"][0]
    assert state["again"] is not old
    # Earlier references to the file keep the old content.
    assert torch.equal(old.read(), before)
    del state, loaded, found, old
    gc.collect()
    assert os.listdir(tmp_path) == ["c"]


def test_what_was_linked_is_loaded_into_files(tmp_path):
    found = in_files(tmp_path / "own")
    penstock.save(tmp_path / "c", state_of(found))
    state = state_of(in_files(tmp_path / "other", seed=5))
    penstock.load(tmp_path / "c", into=state)
    assert_same(read_all(state)["moments"], state_of(values(2))["moments"])


def test_places_without_a_file_are_filled(tmp_path, saved):
    want = values()
    targets = {
        label: Target(tmp_path / f"new-{label}", tensor.dtype, tuple(tensor.shape), None)
        for label, tensor in want.items()
    }
    state = {"moments": [targets["first"], (targets["second"], {"scalar": targets["scalar"]})]}
    loaded = penstock.load(saved, into=state, keys=["moments.*"])
    assert_same(read_all(loaded)["moments"], state_of(want)["moments"])
    assert targets["first"].asked[1] == ((3, 0), (3, 5000)), "a few rows at a time"


def test_windows_of_other_tensors_are_filled(tmp_path):
    base = torch.arange(600.0).reshape(30, 20)
    penstock.save(tmp_path / "c", {"base": base, "turned": base.t(), "row": base[2]})
    held = Held(tmp_path / "own", {"turned": torch.zeros(20, 30), "row": torch.zeros(20)})
    state = {
        "base": torch.zeros(30, 20),
        "turned": held.tensor("turned"),
        "row": held.tensor("row"),
    }
    penstock.load(tmp_path / "c", into=state)
    assert torch.equal(state["turned"].read(), base.t())
    assert torch.equal(state["row"].read(), base[2])
    assert torch.equal(state["base"], base)


MISMATCHES = {
    "shape": (
        lambda state, held: state.update(empty=held.tensor("scalar")),
        r"empty: shape \[0, 3\]",
    ),
    "dtype": (
        lambda state, held: state["moments"].__setitem__(0, held.tensor("half")),
        r"moments\.0: dtype float32 in the checkpoint, float16 in the target",
    ),
    "plain": (lambda state, held: state.update(step=held.tensor("scalar")), "step: a plain value"),
    "tied": (
        lambda state, held: state.update(weights=held.tensor("one"), other=held.tensor("one")),
        "other: is weights as well in the target",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path, kind):
    whole = state_of(values())
    penstock.save(tmp_path / "c", {**whole, "other": torch.ones(1000)})
    spoil, message = MISMATCHES[kind]
    own = {"scalar": torch.tensor(1.0), "half": torch.zeros(70, 5000, dtype=torch.float16)}
    held = Held(tmp_path / "own", {**own, "one": torch.zeros(1000)})
    state = {**state_of(in_files(tmp_path / "moments")), "other": torch.zeros(1000)}
    spoil(state, held)
    first = state["again"]
    with pytest.raises(StateMismatchError, match=message):
        penstock.load(tmp_path / "c", into=state)
    assert state["again"] is first
    if kind != "tied":
        assert not torch.any(state["weights"])


def test_damage_leaves_the_old_files_in_place(tmp_path, saved):
    shard = next(saved.glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[4096 + 5000] ^= 1
    shard.write_bytes(data)
    state = state_of(in_files(tmp_path / "own"))
    first = state["again"]
    with pytest.raises(CorruptCheckpointError, match=r"moments\.0|again"):
        penstock.load(saved, into=state)
    assert state["again"] is first
    gc.collect()
    assert sorted(os.listdir(tmp_path)) == ["c", "own"]


def test_a_load_falls_back_past_damage(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")
    for seed in (1, 2):
        store.save(seed, state_of(in_files(tmp_path / "saved", seed)))
        gc.collect()
    shard = next((tmp_path / "store" / "step-0000000002").glob("shard-00000-01*"))
    data = bytearray(shard.read_bytes())
    data[4096 + 5000] ^= 1
    shard.write_bytes(data)
    state = state_of(in_files(tmp_path / "own", seed=7))
    with pytest.warns(PenstockWarning, match="step 2"):
        store.load(into=state, fallback=True)
    assert_same(read_all(state)["moments"], state_of(values(1))["moments"])


def test_the_report_counts_what_went_into_files(tmp_path, saved):
    reports = []
    penstock.load(saved, into=state_of(in_files(tmp_path / "own")), report=reports.append)
    penstock.load(saved, into=state_of(values(7)), report=reports.append)
    in_file, in_memory = reports
    assert in_file.bytes == in_memory.bytes
    assert in_file.bytes_read >= in_memory.bytes
    assert in_file.verified
    assert {"open", "build"} <= in_file.phases.keys()
