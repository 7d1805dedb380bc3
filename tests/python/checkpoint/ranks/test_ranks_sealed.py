"""Ranks seal one checkpoint together, and ranks of any number load it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import penstock
from compare import assert_same
from dtensors import (
    Layout,
    as_loaded,
    cleared,
    dtensors,
    local_bytes,
    plain,
    rank,
    sharded,
    values,
    whole_dtensors,
)
from penstock.errors import OtherCheckpointError, RankError, SealedError
from penstock.sealing import Sealing
from ranks import IMPATIENT

pytestmark = pytest.mark.quick

KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32


# Functions that run on every rank.


def save(path, background):
    state = {"d": dtensors(), "p": plain(rank())}
    # Each rank has a recipient of its own; those of the first rank count.
    sealing = Sealing([KEY if rank() == 0 else "PENSTOCK-SECRET-KEY-1" + f"{rank():02}" * 32])
    if background is None:
        penstock.save(path, state, sealing=sealing, metadata={"a": 1})
        return
    with penstock.CheckpointStore(path.parent, sealing=sealing) as store:
        pending = store.save_async(1, state, lazy=background == "lazy")
        pending.stage()
        pending.result()


def load(path):
    expected = {"d": dtensors(), "p": as_loaded(plain(rank()))}
    state = cleared(expected)
    loaded = penstock.load(path, into=state, identities=[KEY])
    assert local_bytes(state) == local_bytes(expected)
    assert_same(loaded["p"], expected["p"])
    assert_same(penstock.load(path, identities=[KEY])["d"], whole_dtensors())


def layouts(dim):
    line = list(range(dist.get_world_size()))
    return {
        "rows": Layout(line, [Shard(dim)], (13, 5), torch.float32),
        "large": Layout(line, [Shard(dim)], (1500, 700), torch.float32),
    }


def save_rows(path):
    state = {name: sharded(name, layout) for name, layout in layouts(0).items()}
    penstock.save(path, state, sealing=Sealing([KEY]))


def load_columns(path):
    expected = {name: sharded(name, layout) for name, layout in layouts(1).items()}
    state = cleared(expected)
    penstock.load(path, into=state, identities=[KEY])
    assert local_bytes(state) == local_bytes(expected)


def save_differently(path, sealing_rank):
    sealing = Sealing([KEY]) if rank() == sealing_rank else None
    penstock.save(path, {"a": rank()}, sealing=sealing, options=IMPATIENT)


def save_steps(root, steps, loads):
    """Each rank has a store, and the first one's list counts."""
    sealing = Sealing([KEY])
    with penstock.CheckpointStore(root, sealing=sealing, identities=[KEY]) as store:
        if loads:
            store.load()
        reports = []
        for step in steps:
            state = {"step": step, "a": torch.full((100,), rank())}
            if step % 2:
                reports.append(store.save(step, state))
            else:
                reports.append(store.save_async(step, state).result())
        return [report.checkpoint_id for report in reports]


def load_not_before(root, known):
    store = penstock.CheckpointStore(root, identities=[KEY])
    return store.load(not_before=known)["step"]


# The tests.


@pytest.mark.parametrize("background", [None, "eager", "lazy"])
def test_ranks_seal_and_load(jobs, disk_path, background):
    path = disk_path / "step-0000000001"
    jobs.of(4).call(save, path, background)
    jobs.of(4).call(load, path)
    state = penstock.load(path, rank=2, identities=[KEY])
    assert_same(state["d"], whole_dtensors())
    assert_same(state["p"], as_loaded(plain(2)))
    assert penstock.verify(path).ok
    with pytest.raises(SealedError):
        penstock.load(path)


@pytest.mark.parametrize(("savers", "loaders"), [(4, 2), (2, 4)])
def test_other_ranks_load_what_is_sealed(jobs, disk_path, savers, loaders):
    path = disk_path / "ckpt"
    jobs.of(savers).call(save_rows, path)
    jobs.of(loaders).call(load_columns, path)
    whole = penstock.load(path, identities=[KEY])
    assert_same(whole["rows"], values("rows", (13, 5)))


def test_ranks_list_the_checkpoints_before(jobs, disk_path):
    root = disk_path / "store"
    ids = jobs.of(2).call(save_steps, root, [1, 2, 3], False)[0]
    ids += jobs.of(4).call(save_steps, root, [4, 5], True)[0]
    newest = penstock.inspect(root / "step-0000000005")
    assert list(newest.previous) == ids[3::-1]
    assert jobs.of(2).call(load_not_before, root, ids[0]) == [5, 5]
    outcomes = jobs.of(2).outcomes(load_not_before, root, "f" * 32)
    assert all(isinstance(one, OtherCheckpointError) for one in outcomes), outcomes


@pytest.mark.parametrize("sealing_rank", [0, 1])
def test_ranks_that_differ_in_sealing_save_nothing(jobs, disk_path, sealing_rank):
    path = disk_path / "ckpt"
    outcomes = jobs.of(2).outcomes(save_differently, path, sealing_rank)
    assert all(isinstance(one, RankError) for one in outcomes), outcomes
    assert not (path / "manifest.json").exists()
