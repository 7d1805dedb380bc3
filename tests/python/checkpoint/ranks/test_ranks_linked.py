"""Tensors in files of many ranks: each rank links its own; the lowest rank links replicas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import penstock
from compare import assert_same
from dtensors import GRID, LINE, STRIDED, Layout, rank, sharded, values
from held_files import Held, Target
from penstock.errors import RankError, UnsupportedStateError
from ranks import IMPATIENT

KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32

LAYOUTS = {
    "rows": Layout(LINE, [Shard(0)], (8, 3)),
    "columns": Layout(LINE, [Shard(1)], (3, 10)),
    "one": Layout(LINE, [Shard(0)], (1,)),
    "bfloat16": Layout(LINE, [Shard(0)], (6, 3), torch.bfloat16),
    # Held by ranks 0 and 2, and by 1 and 3.
    "hybrid": Layout(GRID, [Replicate(), Shard(0)], (1201, 1000)),
    "fsdp_tp": Layout(GRID, [STRIDED, Shard(0)], (8, 4)),
    "high": Layout([3, 2], [Replicate()], (4, 4)),
}


def name_of_moment(name):
    return f"{name} moment"


def sealing(is_sealed):
    return penstock.Sealing([KEY]) if is_sealed else None


def held_state(root, *, spoil=None, is_sealed=False):
    """Returns parameters in memory, and their moments in one file of this rank."""
    model = {name: sharded(name, layout) for name, layout in LAYOUTS.items()}
    moments = {
        name: sharded(name_of_moment(name), layout).to_local()
        for name, layout in LAYOUTS.items()
        if model[name].device_mesh.get_coordinate() is not None
    }
    if spoil is not None:
        moments[spoil] += 1
    moments["own"] = torch.full((3,), float(rank()))
    held = Held(Path(root) / f"held-{rank()}", moments, is_sealed=is_sealed)
    found = {
        name: held.tensor(name, like=model[name])
        if name in moments
        else sharded(name_of_moment(name), layout)
        for name, layout in LAYOUTS.items()
    }
    return {
        "model": model,
        "moments": {**found, "tied": found["rows"]},
        "own": held.tensor("own"),
        "mine": penstock.PerRank(held.tensor("own")),
    }


def whole():
    return {name: values(name, one.shape, one.dtype) for name, one in LAYOUTS.items()}


def whole_moments():
    found = {
        name: values(name_of_moment(name), one.shape, one.dtype) for name, one in LAYOUTS.items()
    }
    return {**found, "tied": found["rows"]}


def save_held(root, how, is_sealed=False):
    state = held_state(root, is_sealed=is_sealed)
    if how == "save":
        return penstock.save(Path(root) / "c", state, sealing=sealing(is_sealed))
    store = penstock.CheckpointStore(Path(root) / "store", sealing=sealing(is_sealed))
    return store.save_async(1, state, lazy=how == "lazy").result()


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("how", ["save", "eager", "lazy"])
def test_ranks_link_to_their_files(jobs, tmp_path, how, is_sealed):
    reports = jobs.of(4).call(save_held, str(tmp_path), how, is_sealed)
    path = tmp_path / "c" if how == "save" else tmp_path / "store" / "step-0000000001"
    state = penstock.load(path, identities=[KEY] if is_sealed else None)
    assert_same(state["model"], whole())
    assert_same(state["moments"], whole_moments())
    assert torch.equal(state["own"], torch.zeros(3))
    assert penstock.verify(path).ok
    linked = sorted(path.glob("shard-*"))
    assert len(reports) == 4
    assert all(report.linked_bytes > 0 for report in reports)
    assert sum(report.linked_bytes + report.bytes for report in reports) == sum(
        file.stat().st_size for file in path.iterdir()
    )
    assert len(linked) >= 4


def save_spoiled(root, is_sealed):
    state = held_state(root, spoil="hybrid" if rank() == 3 else None, is_sealed=is_sealed)
    try:
        penstock.save(Path(root) / "c", state, options=IMPATIENT, sealing=sealing(is_sealed))
    except RankError as error:
        return str(error)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_replicas_that_differ_are_told(jobs, tmp_path, is_sealed):
    told = jobs.of(4).call(save_spoiled, str(tmp_path), is_sealed)
    assert all("moments.hybrid is not the same on ranks 1 and 3" in text for text in told)
    assert not os.path.exists(tmp_path / "c" / "manifest.json")


def save_neighbours(root):
    """Saves files that hold the same tensor among different neighbours."""
    model = sharded("hybrid", LAYOUTS["hybrid"])
    moment = sharded("moment", LAYOUTS["hybrid"])
    other = torch.full((1000,), float(rank()))
    held = Held(Path(root) / f"held-{rank()}", {"other": other, "moment": moment.to_local()})
    state = {"moment": held.tensor("moment", like=model), "other": held.tensor("other")}
    penstock.save(Path(root) / "c", state)


def test_replicas_may_have_other_neighbours(jobs, tmp_path):
    jobs.of(4).call(save_neighbours, str(tmp_path))
    found = penstock.load(tmp_path / "c")
    assert_same(found["moment"], values("moment", (1201, 1000)))


ELSEWHERE = {
    2: {
        "rows": Layout([0, 1], [Shard(1)], (8, 3)),
        "columns": Layout([0, 1], [Shard(0)], (3, 10)),
        "one": Layout([0, 1], [Shard(0)], (1,)),
        "bfloat16": Layout([0, 1], [Replicate()], (6, 3), torch.bfloat16),
        "hybrid": Layout([1, 0], [Shard(0)], (1201, 1000)),
        "fsdp_tp": Layout([0, 1], [Shard(0)], (8, 4)),
        "high": Layout([1], [Replicate()], (4, 4)),
    },
    4: {
        **LAYOUTS,
        "rows": Layout(GRID, [Shard(1), Shard(0)], (8, 3)),
        "columns": Layout(GRID, [STRIDED, Replicate()], (3, 10)),
        "fsdp_tp": Layout(GRID, [STRIDED, Replicate()], (8, 4)),
    },
}


def load_held(root, size):
    """Loads moments into files, and compares their content on this rank."""
    layouts = ELSEWHERE[size]
    model = {name: sharded(name, layout) for name, layout in layouts.items()}
    local = {name: tensor.to_local() for name, tensor in model.items()}
    held = Held(
        Path(root) / f"new-{rank()}", {name: torch.zeros_like(one) for name, one in local.items()}
    )
    targets = {name: held.tensor(name, like=model[name]) for name in layouts}
    one = local["rows"]
    targets["rows"] = Target(
        Path(root) / f"rows-{rank()}", one.dtype, tuple(one.shape), model["rows"]
    )
    state = {"moments": {**targets, "tied": targets["rows"]}}
    penstock.load(Path(root) / "c", into=state, keys=["moments.*"])
    found = state["moments"]
    assert found["tied"] is found["rows"]
    assert all(found[name].like is model[name] for name in layouts)
    for name, layout in layouts.items():
        expected = sharded(name_of_moment(name), layout).to_local()
        assert_same(found[name].read(), expected)


@pytest.mark.parametrize("size", ELSEWHERE)
def test_other_ranks_load_into_files(jobs, tmp_path, size):
    jobs.of(4).call(save_held, str(tmp_path), "save")
    # Each rank compares its part, and raises if it differs.
    assert jobs.of(size).call(load_held, str(tmp_path), size) == [None] * size


def save_pieces(root):
    parameter = sharded("pieces", Layout(GRID, [STRIDED, Replicate()], (9, 4)))
    held = Held(Path(root) / f"held-{rank()}", {"moment": parameter.to_local()})
    try:
        state = {"a": {"b": held.tensor("moment", like=parameter)}}
        penstock.save(Path(root) / "c", state, options=IMPATIENT)
    except (UnsupportedStateError, RankError) as error:
        return str(error)


def test_what_no_link_can_store_is_named(jobs, tmp_path):
    told = jobs.of(4).call(save_pieces, str(tmp_path))
    assert any("a.b: this rank holds 2 pieces" in str(text) for text in told)
    assert not (tmp_path / "c" / "manifest.json").exists()
