"""Salvaging a damaged checkpoint of many ranks.

Each rank's own values are independent; a tensor that ranks share is whole or missing.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Replicate, Shard

import penstock
from compare import assert_same
from dtensors import LINE, Layout, as_loaded, cleared, plain, rank, sharded
from penstock.errors import CorruptCheckpointError, PartialCheckpointError
from penstock.integrations.dcp import StorageReader
from three_ranks import HELD, WHOLES, commit, file_of, flip, leaf, tree_of


@pytest.fixture
def path(tmp_path):
    """Commits a checkpoint in which each rank has a tree of its own."""
    return commit(tmp_path / "bad", [tree_of(rank) for rank in range(3)])


@pytest.fixture
def alike(tmp_path):
    """Commits a checkpoint in which all ranks have the first one's tree."""
    first = json.dumps(tree_of(0), separators=(",", ":"))
    return commit(tmp_path / "bad", [first, '{"$":"first"}', '{"$":"first"}'])


def expected(rank, *lost):
    """Returns a rank's state without some of its top-level members and members of the model."""
    rows, tail = (torch.from_numpy(WHOLES[name]) for name in ("model.rows", "tail"))
    own = torch.full((2 + rank,), float(rank))
    model = {name: torch.from_numpy(WHOLES[f"model.{name}"]) for name in ("rows", "one", "late")}
    state = {
        "model": {name: value for name, value in model.items() if name not in lost},
        "window": rows.flatten()[1:7:5],
        "tail": [tail, {"deep": tail}],
        "own": own,
        "tied": own,
        "rank": rank,
        "lr": 0.5,
    }
    return {name: value for name, value in state.items() if name not in lost}


def names(missing):
    return {(entry.name, entry.rank) for entry in missing}


# Explaining.


def test_a_good_one_is_explained_as_such(path):
    explained = penstock.explain(path)
    assert explained.ok
    assert (explained.described_by, explained.world_size, explained.ranks_lost) == ("whole", 3, ())
    found = [(fate.name, fate.rank) for fate in explained.intact]
    assert found == [(name, None) for name in WHOLES] + [("own", rank) for rank in range(3)]
    assert [fate.shape for fate in explained.tensors[:1]] == [(6, 4)]
    assert explained.tensors[0].bytes == 96
    assert explained.bytes_checked == penstock.inspect(path).bytes


def test_damage_names_rank_place_and_tensor(path):
    flip(path, "model.rows", 1)
    flip(path, "own", 2)
    explained = penstock.explain(path)
    assert names(explained.hit) == {("model.rows", None), ("own", 2)}
    rows, own = explained.hit
    assert rows.hit.startswith("1 of 3 boxes, first [2:4, 0:4] of rank 1: shard-00001-00.")
    assert "offset" in rows.hit
    assert own.hit.startswith("shard-00002-00.")


def test_what_a_lost_part_held_is_named_by_the_others(path):
    file_of(path, "part", 1).unlink()
    explained = penstock.explain(path)
    assert (explained.described_by, explained.ranks_lost) == ("headers", (1,))
    assert explained.missing_files == (f"part-00001.{penstock_id(path)}.json",)
    intact = {("model.one", None), ("model.late", None), ("own", 0), ("own", 2)}
    assert names(explained.intact) == intact
    assert names(explained.unverified) == {("model.rows", None), ("tail", None), ("own", 1)}
    file_of(path, "shard", 1).unlink()
    explained = penstock.explain(path)
    assert names(explained.intact) == intact
    assert names(explained.hit) == {("model.rows", None), ("tail", None)}
    assert all("[" in fate.hit and "part-00001." in fate.hit for fate in explained.hit)


def penstock_id(path):
    return json.loads((path / "manifest.json").read_text())["id"]


# Salvaging.


def test_each_rank_keeps_what_is_intact(path, tmp_path):
    flip(path, "model.rows", 1)
    flip(path, "own", 2)
    out = tmp_path / "out"
    report = penstock.salvage(path, out)
    assert names(report.missing) == {("model.rows", None), ("own", 2), ("tied", 2)}
    assert (report.is_partial, report.unverified, report.values_lost) == (True, False, False)
    assert (report.tensors, report.step) == (5, 7)
    with pytest.raises(PartialCheckpointError, match=r"model\.rows") as raised:
        penstock.load(out)
    assert set(raised.value.missing) == {"model.rows", "window"}
    for loaded in (
        penstock.load(out, allow_partial=True),
        penstock.load(out, rank=0, allow_partial=True),
    ):
        assert_same(loaded, expected(0, "rows", "window"))
    assert_same(penstock.load(out, rank=1, allow_partial=True), expected(1, "rows", "window"))
    with pytest.raises(PartialCheckpointError) as raised:
        penstock.load(out, rank=2)
    assert set(raised.value.missing) == {"model.rows", "window", "own", "tied"}
    loaded = penstock.load(out, rank=2, allow_partial=True)
    assert_same(loaded, expected(2, "rows", "window", "own", "tied"))
    # Intact tensors requested by name need no `allow_partial`.
    assert_same(penstock.load(out, keys="tail.*"), {"tail": expected(0)["tail"]})
    with pytest.raises(PartialCheckpointError, match="nothing of it is left"):
        penstock.load(out, keys="model.rows", allow_partial=True)


def test_targets_of_what_is_missing_are_left_alone(path, tmp_path):
    flip(path, "model.rows", 1)
    out = tmp_path / "out"
    penstock.salvage(path, out)
    rows = torch.full((6, 4), 3.0)
    target = {"model": {"rows": rows, "late": torch.zeros(6, 4)}, "lr": 0.0}
    with pytest.raises(PartialCheckpointError):
        penstock.load(out, into=target)
    assert target["model"]["late"].count_nonzero() == 0
    whole = {**cleared(expected(0)), "model": {**cleared(expected(0)["model"]), "rows": rows}}
    penstock.load(out, into=whole, allow_partial=True)
    assert_same(whole["model"]["late"], expected(0)["model"]["late"])
    assert bool((whole["model"]["rows"] == 3).all())


def test_what_was_salvaged_is_seen_as_such(path, tmp_path):
    flip(path, "tail", 2)
    flip(path, "own", 1)
    out = tmp_path / "out"
    penstock.salvage(path, out)
    info = penstock.inspect(out)
    assert (info.partial, info.world_size, info.source_id) == (True, 3, penstock_id(path))
    assert names(info.missing) == {("tail", None), ("own", 1), ("tied", 1)}
    assert info.metadata == {"run": "a"}
    assert names(info.tensors) == {(name, None) for name in WHOLES if name != "tail"} | {
        ("own", 0), ("own", 2),
    }  # fmt: skip
    assert info.values() == {"rank": 0, "lr": 0.5}
    result = penstock.verify(out)
    assert (result.ok, result.is_partial) == (True, True)
    again = penstock.salvage(out, tmp_path / "again")
    assert names(again.missing) == names(info.missing)


@pytest.mark.parametrize("lost", range(3))
def test_a_rank_without_its_part_has_nothing_of_its_own(path, tmp_path, lost):
    file_of(path, "part", lost).write_text("{")
    out = tmp_path / "out"
    report = penstock.salvage(path, out)
    assert (report.ranks_lost, report.values_lost, report.unverified) == ((lost,), True, False)
    gone = {name for name, held in HELD.items() if held[lost] is not None}
    state = f"state of rank {lost}"
    of_lost = {("own", lost), (state, lost)}
    assert names(report.missing) == {(name, None) for name in gone} | of_lost
    hit = {name.removeprefix("model.") for name in gone} | {"window"}
    for other in {0, 1, 2} - {lost}:
        loaded = penstock.load(out, rank=other, allow_partial=True)
        assert_same(loaded, expected(other, *hit))
    for arguments in ({}, {"allow_partial": True}):
        with pytest.raises(PartialCheckpointError, match=state if not arguments else "left"):
            penstock.load(out, rank=lost, **arguments)
    # A load of all ranks' state names the losses of any rank.
    with pytest.raises(PartialCheckpointError, match=state):
        penstock.load(out)
    loaded = penstock.load(out, allow_partial=True)
    if lost:
        assert_same(loaded, expected(0, *hit))
    else:
        # Another rank's tree places the shared tensors, but not the first rank's own values.
        assert_same(
            loaded, {"model": {"late": expected(0)["model"]["late"]}, "tail": expected(0)["tail"]}
        )


def test_without_any_tree_shared_tensors_are_had_by_name(alike, tmp_path):
    file_of(alike, "part", 0).unlink()
    out = tmp_path / "out"
    report = penstock.salvage(alike, out)
    assert report.ranks_lost == (0,)
    assert names(report.missing) >= {("model.rows", None), ("state of rank 0", 0)}
    with pytest.raises(PartialCheckpointError, match="state of rank 0"):
        penstock.load(out)
    state = {name: torch.from_numpy(WHOLES[name]) for name in ("tail", "model.late")}
    for arguments in ({}, {"rank": 0}, {"rank": 1}):
        assert_same(penstock.load(out, allow_partial=True, **arguments), state)
    assert_same(penstock.load(out, keys="tail"), {"tail": state["tail"]})
    report = penstock.salvage(alike, tmp_path / "all", unverified=True)
    assert report.unverified
    state = {name: torch.from_numpy(WHOLES[name]) for name in WHOLES}
    loaded = penstock.load(tmp_path / "all", allow_partial=True)
    assert_same({name: loaded[name] for name in state}, state)
    assert_same(loaded["own"], torch.zeros(2))


def test_without_the_manifest_it_takes_a_word(path, tmp_path):
    flip(path, "own", 1)
    (path / "manifest.json").unlink()
    explained = penstock.explain(path)
    assert (explained.described_by, explained.world_size, explained.intact) == ("part", 3, ())
    with pytest.raises(CorruptCheckpointError, match="unverified=True"):
        penstock.salvage(path, tmp_path / "out")
    report = penstock.salvage(path, tmp_path / "out", unverified=True)
    assert names(report.missing) == {("own", 1), ("tied", 1)}
    with pytest.raises(PartialCheckpointError, match="nothing proves"):
        penstock.load(tmp_path / "out", keys="lr")
    for other in (0, 2):
        loaded = penstock.load(tmp_path / "out", rank=other, allow_partial=True)
        assert_same(loaded, expected(other))


def test_layers_of_a_stage_are_not_passed_over(tmp_path):
    """A tensor that only another rank's tree names is reported as missing from the whole state."""
    trees = [
        {"model": {"one": leaf("model.one"), "rows": leaf("model.rows")}},
        {"model": {"tail": leaf("tail")}},
        {"model": {"tail": leaf("tail"), "late": leaf("model.late")}},
    ]
    path = commit(tmp_path / "bad", trees)
    flip(path, "model.late", 2)
    out = tmp_path / "out"
    penstock.salvage(path, out)
    with pytest.raises(PartialCheckpointError) as raised:
        penstock.load(out, keys="model.*")
    assert raised.value.missing == ("model.late",)
    with pytest.raises(PartialCheckpointError) as raised:
        penstock.load(out)
    assert "model.late" in raised.value.missing
    zeros = {name: torch.zeros(6, 4) for name in ("one", "rows", "tail")}
    into = {"model": {**zeros, "late": torch.full((6, 4), 3.0)}}
    penstock.load(out, into=into, allow_partial=True)
    assert_same(into["model"]["tail"], torch.from_numpy(WHOLES["tail"]))
    assert bool((into["model"]["late"] == 3).all())


def test_what_no_tree_names_any_more_is_had_by_name(tmp_path):
    """The layers of a stage whose part is lost are read by the headers of its shards."""
    stages = [
        {"model": {"one": leaf("model.one"), "rows": leaf("model.rows"), "tail": leaf("tail")}},
        {"model": {"tail": leaf("tail")}},
        {"model": {"late": leaf("model.late")}},
    ]
    path = commit(tmp_path / "bad", stages)
    file_of(path, "part", 2).unlink()
    report = penstock.salvage(path, tmp_path / "out", unverified=True)
    assert {name for name, rank in names(report.missing)} == {"state of rank 2"}
    loaded = penstock.load(tmp_path / "out", allow_partial=True)
    assert_same(loaded["model.late"], torch.from_numpy(WHOLES["model.late"]))
    assert set(loaded["model"]) == {"one", "rows", "tail"}
    # Without `unverified=True` they are unknown, and the state of all is not complete.
    penstock.salvage(path, tmp_path / "proven")
    with pytest.raises(PartialCheckpointError, match="state of rank 2"):
        penstock.load(tmp_path / "proven")
    into = {"model": {"one": torch.zeros(6, 4)}}
    with pytest.raises(PartialCheckpointError, match="state of rank 2"):
        penstock.load(tmp_path / "proven", into=into)
    with pytest.raises(PartialCheckpointError, match="state of rank 2"):
        penstock.load(tmp_path / "proven", keys="model.*")
    one = {"model": {"one": torch.from_numpy(WHOLES["model.one"])}}
    assert_same(penstock.load(tmp_path / "proven", keys="model.one"), one)


def test_dcp_reads_what_is_whole_and_refuses_what_is_partial(tmp_path):
    members = {name.rpartition(".")[2]: leaf(name) for name in WHOLES}
    path = commit(tmp_path / "bad", [members] * 3)
    penstock.salvage(path, tmp_path / "whole")
    state = {"rows": torch.zeros(6, 4), "tail": torch.zeros(6, 4)}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "whole"), no_dist=True)
    assert_same(state["rows"], torch.from_numpy(WHOLES["model.rows"]))
    flip(path, "model.rows", 0)
    penstock.salvage(path, tmp_path / "out")
    with pytest.raises(CheckpointException, match=r"partial: .* lacks 'rows'"):
        dcp.load(state, storage_reader=StorageReader(tmp_path / "out"), no_dist=True)


# At work.


SHAPE = Layout(LINE, [Shard(0)], (10, 6))
SAME = Layout(LINE, [Replicate()], (9, 5))


def training_state():
    return {
        "rows": sharded("rows", SHAPE),
        "same": sharded("same", SAME),
        "plain": plain(rank()),
        "epoch": 3,
    }


def save(path):
    penstock.save(path, training_state())


def resume(path):
    """Loads into a rank's own state; missing values stay 0."""
    state = cleared(training_state())
    penstock.load(path, into=state, allow_partial=True)
    found = {name: state[name].to_local() for name in ("rows", "same")}
    return {**found, "plain": state["plain"], "epoch": state["epoch"]}


def test_ranks_resume_with_what_is_left(jobs, tmp_path):
    job, path = jobs.of(4), tmp_path / "bad"
    job.call(save, path)
    good = job.call(resume, path)
    flip(path, "rows", 2)
    out = tmp_path / "out"
    report = penstock.salvage(path, out)
    assert names(report.missing) == {("rows", None)}
    for found, whole in zip(job.call(resume, out), good, strict=True):
        assert found["rows"].count_nonzero() == 0
        assert_same({**found, "rows": None}, {**whole, "rows": None})
    # After the loss of a part, its rank's own values are missing, the other ranks' remain.
    file_of(path, "part", 3).unlink()
    report = penstock.salvage(path, tmp_path / "less")
    assert ("state of rank 3", 3) in names(report.missing)
    lost = {name for name, whose in names(report.missing) if whose is None}
    found = job.call(resume, tmp_path / "less")
    for other in range(3):
        kept, whole = found[other]["plain"]["plain"], good[other]["plain"]["plain"]
        assert kept["rank"] == other
        assert_same(kept["own"], whole["own"])
    assert found[3]["plain"]["plain"]["rank"] == 0
    assert all(bool(one["same"].count_nonzero()) == ("same" not in lost) for one in found)
    one = penstock.load(tmp_path / "less", allow_partial=True)
    assert_same(one["plain"]["plain"]["own"], as_loaded(good[0]["plain"]["plain"]["own"]))
