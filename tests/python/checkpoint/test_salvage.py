"""Salvaging a damaged checkpoint: losses are listed, and the rest is saved anew."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import penstock
from compare import assert_same
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PartialCheckpointError,
    PenstockWarning,
    StorageError,
)

INDEX = "model.safetensors.index.json"


def make_state():
    a = torch.arange(300_000.0)
    b = torch.arange(5000).to(torch.bfloat16)
    return {
        "model": OrderedDict(a=a, b=b, tied=a, window=b[10:20]),
        "optimizer": {"state": [{"m": torch.ones(7, 3)}, {"m": torch.zeros(2)}], "lr": 1e-4},
        "array": np.array(["x", "yz"]),
        "blob": b"x" * 5000,
        "note": ("ü", None, 1 << 80, float("nan")),
    }


@pytest.fixture
def state():
    return make_state()


@pytest.fixture
def path(tmp_path, state):
    penstock.save(tmp_path / "bad", state, step=5, metadata={"run": "a"})
    return tmp_path / "bad"


def damage(path, *names):
    for name in names:
        info = next(t for t in penstock.inspect(path).tensors if t.name == name)
        with open(path / info.file, "r+b") as file:
            file.seek(info.begin)
            byte = file.read(1)[0]
            file.seek(info.begin)
            file.write(bytes([byte ^ 8]))


def spread_damage(path, *names):
    """Damages more than a byte, so that the whole digest chunk counts as lost."""
    for name in names:
        info = next(t for t in penstock.inspect(path).tensors if t.name == name)
        with open(path / info.file, "r+b") as file:
            file.seek(info.begin)
            file.write(os.urandom(min(16, info.bytes)))


def part_of(path):
    return next(Path(path).glob("part-*"))


# Explaining.


def test_a_good_checkpoint_is_explained_as_such(path):
    explained = penstock.explain(path)
    assert explained.ok
    assert explained.described_by == "whole"
    assert len(explained.intact) == len(penstock.inspect(path).tensors)
    assert explained.hit == explained.unverified == ()
    assert explained.bytes_checked == penstock.inspect(path).bytes


def test_damage_hits_what_it_touches(path):
    damage(path, "model.b")
    explained = penstock.explain(path)
    assert {tensor.name for tensor in explained.hit} == {"model.b"}
    assert all("offset" in tensor.hit for tensor in explained.hit)
    assert sum(t.bytes for t in explained.intact) > 1_000_000
    assert [problem.tensor for problem in explained.problems] == ["model.b"]


def test_damage_that_cannot_be_placed_hits_all_of_its_chunk(path):
    spread_damage(path, "array")
    hit = {tensor.name for tensor in penstock.explain(path).hit}
    assert "array" in hit
    assert "blob" in hit


def test_missing_files_are_named(path):
    shard = next(path.glob("shard-*"))
    shard.unlink()
    explained = penstock.explain(path)
    assert explained.missing_files == (shard.name,)
    assert explained.intact == ()


def test_the_step_to_go_back_to_is_named(tmp_path, state):
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (1, 2, 3, 4):
        store.save(step, state)
    store.verify(2)
    for step in (3, 4):
        damage(Path(store.path(step)), "model.b")
    assert not store.verify(3).ok
    explained = penstock.explain(store.path(4))
    assert (explained.earlier_step, explained.earlier_is_verified) == (2, True)
    assert penstock.explain(store.path(1)).earlier_step is None


# Salvaging.


def test_exactly_the_intact_tensors_and_the_values_are_there(path, tmp_path, state):
    damage(path, "optimizer.state.0.m")
    report = penstock.salvage(path, tmp_path / "out")
    assert [missing.name for missing in report.missing] == ["optimizer.state.0.m"]
    assert (report.is_partial, report.unverified, report.values_lost) == (True, False, False)
    assert (report.step, report.source_id) == (5, penstock.inspect(path).id)
    loaded = penstock.load(tmp_path / "out", allow_partial=True)
    expected = {**state, "optimizer": {"state": [state["optimizer"]["state"][1]], "lr": 1e-4}}
    assert_same(loaded, expected)
    assert loaded["model"]["a"] is loaded["model"]["tied"]
    assert penstock.inspect(tmp_path / "out").metadata == {"run": "a"}


def test_a_partial_checkpoint_names_what_it_lacks(path, tmp_path, state):
    damage(path, "model.b")
    out = tmp_path / "out"
    penstock.salvage(path, out)
    with pytest.raises(PartialCheckpointError, match="allow_partial=True") as raised:
        penstock.load(out)
    assert raised.value.missing == ("model.b", "model.window")
    assert isinstance(raised.value, IncompleteCheckpointError)
    assert "'model.b'" in str(raised.value)
    assert "keys=" in str(raised.value)
    with pytest.raises(PartialCheckpointError) as raised:
        penstock.load(out, keys=["model.*", "array"])
    assert raised.value.missing == ("model.b", "model.window")
    expected = {"model": OrderedDict(a=state["model"]["a"])}
    assert_same(penstock.load(out, keys="model.a"), expected)
    with pytest.raises(PartialCheckpointError, match="nothing of it is left"):
        penstock.load(out, keys="model.b", allow_partial=True)


def test_targets_of_what_is_missing_are_left_alone(path, tmp_path, state):
    damage(path, "model.b")
    penstock.salvage(path, tmp_path / "out")
    target = make_state()
    target["model"]["a"].zero_()
    target["model"]["b"].fill_(3)
    with pytest.raises(PartialCheckpointError):
        penstock.load(tmp_path / "out", into=target)
    assert target["model"]["a"].count_nonzero() == 0
    penstock.load(tmp_path / "out", into=target, allow_partial=True)
    assert_same(target["model"]["a"], state["model"]["a"])
    assert bool((target["model"]["b"] == 3).all())


def test_what_was_salvaged_is_seen_as_such(path, tmp_path):
    damage(path, "model.b")
    penstock.salvage(path, tmp_path / "out")
    info = penstock.inspect(tmp_path / "out")
    assert (info.partial, info.unverified, info.source_id) == (
        True, False, penstock.inspect(path).id,
    )  # fmt: skip
    lost = {missing.name: missing for missing in info.missing}
    assert (lost["model.b"].dtype, lost["model.b"].shape) == ("bfloat16", (5000,))
    assert "model.b" in lost["model.window"].reason
    assert info.values()["optimizer.lr"] == 1e-4
    result = penstock.verify(tmp_path / "out")
    assert (result.ok, result.is_partial) == (True, True)
    assert not penstock.inspect(path).partial


def test_a_store_takes_no_partial_step_for_a_complete_one(tmp_path, state):
    store = penstock.CheckpointStore(tmp_path / "store", keep_last=1)
    store.save(1, state)
    other = penstock.CheckpointStore(tmp_path / "other")
    other.save(2, state)
    damage(Path(other.path(2)), "model.b")
    penstock.salvage(other.path(2), store.path(2))
    assert store.steps() == [1]
    assert store.scan()[1].state == "partial"
    with pytest.warns(PenstockWarning, match="partial"):
        assert_same(store.load(), state)
    with pytest.raises(PartialCheckpointError):
        store.load(2)
    assert "b" not in store.load(2, allow_partial=True)["model"]
    assert store.verify(2).ok
    assert store.retain(dry_run=True).kept == {1: "among the newest", 2: "partial"}
    assert [step.state for step in store.scrub(max_age_seconds=0).steps] == ["verified", "skipped"]


def test_what_turns_out_whole_is_saved_whole(path, tmp_path, state):
    report = penstock.salvage(path, tmp_path / "out")
    assert not report.is_partial
    assert_same(penstock.load(tmp_path / "out"), state)


def test_without_the_part_nothing_is_recovered_unasked(path, tmp_path, state):
    part_of(path).write_text("gone")
    explained = penstock.explain(path)
    assert (explained.described_by, explained.intact) == ("headers", ())
    assert len(explained.unverified) == len(explained.tensors) == 6
    out = tmp_path / "out"
    with pytest.raises(CorruptCheckpointError, match="unverified=True"):
        penstock.salvage(path, out)
    assert not out.exists()
    report = penstock.salvage(path, out, unverified=True)
    assert (report.unverified, report.values_lost, report.missing) == (True, True, ())
    for arguments in ({}, {"keys": "model.a"}):
        with pytest.raises(PartialCheckpointError, match="nothing proves"):
            penstock.load(out, **arguments)
    reports = []
    loaded = penstock.load(out, allow_partial=True, report=reports.append)
    assert not reports[0].verified
    assert_same(loaded["model.a"], state["model"]["a"])
    assert_same(loaded["model.b"], state["model"]["b"])
    assert penstock.inspect(out).unverified


@pytest.mark.parametrize("loses", ["part", "manifest and part"])
def test_tensors_of_a_newer_type_are_named_where_the_part_is_lost(path, tmp_path, state, loses):
    """Only the header names them, and this version knows no element size for the type."""
    (shard,) = path.glob("shard-*")
    content = shard.read_bytes()
    before = b'"model.a":{"dtype":"F32"'
    assert content.count(before) == 1
    shard.write_bytes(content.replace(before, b'"model.a":{"dtype":"Q32"'))
    part_of(path).write_text("gone")
    if loses != "part":
        (path / "manifest.json").write_text("gone")
    assert any("model.a" in one.message for one in penstock.explain(path).problems)
    report = penstock.salvage(path, tmp_path / "out", unverified=True)
    (missing,) = report.missing
    assert (missing.name, missing.dtype) == ("model.a", "Q32")
    assert "newer" in missing.reason
    assert penstock.inspect(tmp_path / "out").missing == report.missing
    loaded = penstock.load(tmp_path / "out", allow_partial=True)
    assert "model.a" not in loaded
    assert_same(loaded["model.b"], state["model"]["b"])
    assert penstock.verify(tmp_path / "out").ok


def test_without_the_manifest_the_part_is_believed_on_request(path, tmp_path, state):
    damage(path, "model.b")
    (path / "manifest.json").write_text("gone")
    assert penstock.explain(path).described_by == "part"
    report = penstock.salvage(path, tmp_path / "out", unverified=True)
    assert {missing.name for missing in report.missing} == {"model.b", "model.window"}
    loaded = penstock.load(tmp_path / "out", allow_partial=True)
    assert_same(loaded["array"], state["array"])
    assert_same(loaded["note"], state["note"])


def test_what_is_in_the_way_stays(path, tmp_path):
    penstock.save(tmp_path / "out", {"x": 1})
    for taken in (tmp_path / "out", path, path / "sub"):
        with pytest.raises(StorageError, match="new or an empty directory"):
            penstock.salvage(path, taken)
    assert penstock.load(tmp_path / "out") == {"x": 1}
    with pytest.raises(CheckpointNotFoundError):
        penstock.salvage(tmp_path / "none", tmp_path / "out2")
    with pytest.raises(CheckpointNotFoundError):
        penstock.explain(tmp_path / "none")


def test_other_tools_read_what_was_salvaged(path, tmp_path, state):
    from safetensors.torch import load_file

    damage(path, "model.b")
    penstock.salvage(path, tmp_path / "out")
    tensors = load_file(next((tmp_path / "out").glob("shard-*")))
    assert_same(tensors["model.a"], state["model"]["a"])
    assert "model.b" not in tensors


# Groups and small files.


def save_model(path):
    """Saves a model of two tensors with an index, and other values of a run."""
    state = {
        "module": {"_orig_mod": {"w": torch.arange(300_000.0), "b": torch.ones(70)}},
        "moments": torch.zeros(300_000),
        "step": 7,
    }
    files = {"config.json": b'{"a": 1}', "vocab.json": b"{}"}
    penstock.save(path, state, step=5, groups={"module": ""}, files=files)
    return state


def assert_is_model(path, state):
    index = json.loads((path / INDEX).read_text())
    model = state["module"]["_orig_mod"]
    found = {name: load_file(path / file)[name] for name, file in index["weight_map"].items()}
    assert_same(found, dict(sorted(model.items())))
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in model.values())
    # The files of the model hold no other tensor.
    assert sum(len(load_file(path / file)) for file in set(index["weight_map"].values())) == 2


def test_a_model_stays_one_where_something_else_is_hit(tmp_path):
    path, out, again = tmp_path / "bad", tmp_path / "out", tmp_path / "again"
    state = save_model(path)
    damage(path, "moments")
    report = penstock.salvage(path, out)
    assert ([one.name for one in report.missing], report.files_lost) == (["moments"], {})
    assert_is_model(out, state)
    assert (out / "config.json").read_bytes() == b'{"a": 1}'
    assert penstock.verify(out).ok
    penstock.salvage(out, again)
    assert_is_model(again, state)


def test_what_is_left_of_a_model_has_no_index(tmp_path):
    path, out = tmp_path / "bad", tmp_path / "out"
    save_model(path)
    damage(path, "module._orig_mod.w")
    report = penstock.salvage(path, out)
    assert list(report.files_lost) == [INDEX]
    assert "not all there" in report.files_lost[INDEX]
    assert "file lost" in str(report)
    assert not (out / INDEX).exists()
    assert (out / "config.json").exists()
    left = [load_file(file) for file in sorted(out.glob("*.safetensors"))]
    assert sorted(map(sorted, left)) == [["b"], ["moments"]]
    # A second salvage of the result loses no further file, and adds no index.
    assert penstock.salvage(out, tmp_path / "again").files_lost == {}
    assert not (tmp_path / "again" / INDEX).exists()


def test_a_small_file_comes_from_its_copy_or_is_named(tmp_path):
    path, out = tmp_path / "bad", tmp_path / "out"
    state = save_model(path)
    for file in [*path.glob("beside.*.config.json"), *path.glob("*vocab.json")]:
        file.write_bytes(b"{1}")
    problems = [problem.file for problem in penstock.explain(path).problems]
    assert problems == [problem.file for problem in penstock.verify(path).problems]
    assert len(problems) == 2
    report = penstock.salvage(path, out)
    assert (out / "config.json").read_bytes() == b'{"a": 1}'
    assert list(report.files_lost) == ["vocab.json"]
    assert not (out / "vocab.json").exists()
    assert not report.is_partial
    assert_is_model(out, state)
    assert_same(penstock.load(out), state)


@pytest.mark.parametrize(
    ("lost", "files_lost", "there"),
    [("part-*", [INDEX], ["config.json", "vocab.json"]), ("manifest.json", [], [])],
)
def test_what_tells_of_groups_and_small_files_may_be_lost(tmp_path, lost, files_lost, there):
    path, out = tmp_path / "bad", tmp_path / "out"
    save_model(path)
    next(path.glob(lost)).unlink()
    report = penstock.salvage(path, out, unverified=True)
    assert list(report.files_lost) == files_lost
    names = {"config.json", "vocab.json", INDEX}.intersection(os.listdir(out))
    assert sorted(names) == there
    assert penstock.verify(out).ok
