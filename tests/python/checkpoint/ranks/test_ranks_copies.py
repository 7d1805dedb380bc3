"""Replicated `DTensor`s that differ between ranks: named in the error, nothing is committed."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import penstock
from compare import assert_same
from dtensors import GRID, LINE, Layout, rank, sharded, values
from penstock.checkpoint.layout.sharding import Balance, find_mismatch, is_balanced
from penstock.checkpoint.ranks.members import Copy, Members
from penstock.errors import RankError
from ranks import IMPATIENT

LAYOUTS = {
    "same": Layout(LINE, [Replicate()], (70, 50)),
    # Held by ranks 0 and 2, and by 1 and 3.
    "hybrid": Layout(GRID, [Replicate(), Shard(0)], (9, 20)),
    "high": Layout([3, 2], [Replicate()], (4, 4), torch.bfloat16),
    "rows": Layout(LINE, [Shard(0)], (8, 3)),
}


def state(step):
    found = {name: sharded(f"{name}{step}", layout) for name, layout in LAYOUTS.items()}
    return {"model": found, "plain": values("plain", (5,)), "step": step}


def whole(step):
    return {name: values(f"{name}{step}", one.shape, one.dtype) for name, one in LAYOUTS.items()}


def save(store, step, one):
    store.save(step, one)


def save_async(store, step, one):
    store.save_async(step, one).result()


def save_lazily(store, step, one):
    store.save_async(step, one, lazy=True).result()


CALLS = {one.__name__: one for one in (save, save_async, save_lazily)}


def flip_a_bit(tensor):
    data = tensor.to_local().view(-1).view(torch.uint8)
    data[-1] ^= 1


def save_what_differs(root, name, tensor, culprit):
    """Saves different replicas, which raises, and saves again."""
    store = penstock.CheckpointStore(root, options=IMPATIENT)
    store.save(1, state(1))
    one = state(2)
    if rank() == culprit:
        flip_a_bit(one["model"][tensor])
    try:
        CALLS[name](store, 2, one)
        error = None
    except penstock.PenstockError as caught:
        error = caught.with_traceback(None)
    store.save(3, state(3))
    return (error,)


DIFFERENT = [
    ("save", "same", 3, 0),
    ("save", "same", 0, 0),
    ("save", "hybrid", 3, 1),
    ("save", "high", 2, 2),
    ("save_async", "hybrid", 2, 0),
    ("save_lazily", "same", 1, 0),
]


@pytest.mark.parametrize(("name", "tensor", "culprit", "leader"), DIFFERENT)
def test_copies_that_differ_are_told_by_name_and_not_committed(
    jobs, disk_path, name, tensor, culprit, leader
):
    root, job = disk_path / "store", jobs.of(4)
    errors = job.call(save_what_differs, root, name, tensor, culprit)
    for (error,) in errors:
        assert type(error) is RankError
        assert f"model.{tensor}" in str(error)
        assert f"is not the same on ranks {leader}" in str(error)
        assert "nothing was committed" in str(error)
    store = penstock.CheckpointStore(root)
    assert [(info.step, info.state) for info in store.scan()] == [(1, "complete"), (3, "complete")]
    for step in (1, 3):
        assert_same(store.load(step)["model"], whole(step))


def save_and_change(root, lazy):
    store = penstock.CheckpointStore(root, options=IMPATIENT)
    one = state(1)
    pending = store.save_async(1, one, lazy=lazy)
    pending.stage()
    for tensor in one["model"].values():
        # Changed to something else on each rank.
        tensor.to_local().fill_(rank())
    pending.result()


@pytest.mark.parametrize("lazy", [False, True])
def test_copies_are_compared_as_they_were_at_the_call(jobs, disk_path, lazy):
    jobs.of(4).call(save_and_change, disk_path / "store", lazy)
    assert_same(penstock.CheckpointStore(disk_path / "store").load()["model"], whole(1))


def save_special(path, is_signed):
    """Bits count, not values: a NaN equals itself, and 0 is not -0."""
    one = sharded("special", LAYOUTS["same"])
    one.to_local().fill_(float("nan"))
    one.to_local()[0] = -0.0 if is_signed and rank() == 1 else 0.0
    try:
        penstock.save(path, {"w": one}, options=IMPATIENT)
    except RankError as error:
        return str(error)
    return None


@pytest.mark.parametrize("is_signed", [False, True])
def test_copies_are_compared_bit_by_bit(jobs, disk_path, is_signed):
    for message in jobs.of(4).call(save_special, disk_path / "one", is_signed):
        assert (message is not None) == is_signed
        assert message is None or "is not the same on ranks 0 and 1" in message


def test_ranks_balance_just_when_all_copies_are_the_same():
    everybody, pair = Members.of(range(3)), Members.of([1, 2])
    for marks, expected in [
        ([(7, 7, 7), (5, 5)], None),
        ([(7, 7, 8), (5, 5)], ("a", 2)),
        ([(8, 7, 7), (5, 5)], ("a", 1)),
        ([(7, 7, 7), (5, 6)], ("b", 2)),
    ]:
        balances = [Balance(number) for number in range(3)]
        for number in range(3):
            balances[number].add_copy("a", marks[0][number], "cpu", everybody)
        for number in (1, 2):
            balances[number].add_copy("b", marks[1][number - 1], "cpu", pair)
        assert is_balanced(one.sum for one in balances) == (expected is None)
        found = find_mismatch(one.copies for one in balances)
        assert (found and (found.second.name, found.rank)) == expected


def test_copies_on_different_devices_are_told_as_such():
    copies = [[Copy("a", 0, 1, "cpu")], [Copy("a", 0, 2, "cuda")]]
    found = find_mismatch(copies)
    assert (found.first.device, found.second.device, found.rank) == ("cpu", "cuda", 1)
