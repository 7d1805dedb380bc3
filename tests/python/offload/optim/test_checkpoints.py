"""Checkpoints of optimizers with state in files: linked, kept, loaded, resumed from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from offload.optim.training_of import (
    MEMORY_BYTES,
    SMALL,
    assert_equal,
    assert_equal_states,
    parameters,
    set_gradients,
    stepped,
)
from penstock import offload
from penstock.errors import PenstockWarning, StateMismatchError


def as_pytorch(steps: int) -> tuple[list[Any], Any]:
    theirs = parameters(shapes=SMALL)
    other = torch.optim.AdamW(theirs, fused=True)
    for step in range(steps):
        set_gradients(step, theirs)
        other.step()
    return theirs, other


def inodes(directory: Path) -> set[int]:
    return {file.stat().st_ino for file in directory.iterdir()}


def moment_files(state: dict[str, Any]) -> set[int]:
    values = [value for moments in state["state"].values() for value in moments.values()]
    return {os.stat(value.file.path).st_ino for value in values if hasattr(value, "file")}


@pytest.mark.parametrize("way", ["sync", "async", "lazy"])
def test_a_checkpoint_has_the_files_of_its_step_for_ever(tmp_path: Path, way: str) -> None:
    ours, optimizer = stepped(tmp_path / "state")
    state = {"model": [one.detach() for one in ours], "optimizer": optimizer.state_dict()}
    files = moment_files(state["optimizer"])
    assert len(files) == 2
    path = tmp_path / "checkpoint"
    if way == "sync":
        penstock.save(path, state)
    else:
        with penstock.CheckpointStore(tmp_path / "store", keep_last=2) as store:
            path = Path(store.path(2))
            store.save_async(2, state, lazy=way == "lazy").result()
    del state
    assert files <= inodes(path)
    for step in range(2, 7):
        set_gradients(step, ours)
        optimizer.step()
    assert penstock.verify(path).ok
    theirs, other = as_pytorch(2)
    # Without the optimizer and its directory, it is a checkpoint like any other.
    optimizer.close()
    shutil.rmtree(tmp_path / "state")
    loaded = penstock.load(path)
    assert_equal(loaded["model"], theirs)
    assert_equal_states(other.state_dict(), loaded["optimizer"])
    other.load_state_dict(loaded["optimizer"])


def test_steps_go_on_while_a_save_is_under_way(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path / "state")
    with penstock.CheckpointStore(tmp_path / "store", keep_last=3) as store:
        for step in range(2, 10):
            store.save_async(step, {"optimizer": optimizer.state_dict()})
            set_gradients(step, ours)
            optimizer.step()
        store.wait()
        assert store.steps() == [7, 8, 9]
        for step in store.steps():
            _, other = as_pytorch(step)
            assert_equal_states(other.state_dict(), store.load(step)["optimizer"])
    optimizer.close()


def test_retention_frees_the_files_of_the_steps_it_removes(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path / "state")
    with penstock.CheckpointStore(tmp_path / "store", keep_last=1) as store:
        for step in range(2, 8):
            store.save(step, {"optimizer": optimizer.state_dict()})
            set_gradients(step, ours)
            optimizer.step()
    held = {one.stat().st_ino: one.stat().st_size for one in tmp_path.rglob("*") if one.is_file()}
    whole = 2 * sum(one.numel() * 4 for one in ours)
    # This generation, files for the next one, and the kept checkpoint.
    assert sum(held.values()) < 3.2 * whole
    optimizer.close()


@pytest.mark.parametrize("kind", ["another step", "same step"])
def test_a_state_is_filled_in_place(tmp_path: Path, kind: str) -> None:
    ours, optimizer = stepped(tmp_path / "state")
    penstock.save(tmp_path / "checkpoint", {"optimizer": optimizer.state_dict(), "model": ours})
    if kind == "another step":
        for step in range(2, 4):
            set_gradients(step, ours)
            optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "model": ours}
    before = optimizer.state_dict()
    penstock.load(tmp_path / "checkpoint", into=state)
    assert_equal_states(before, optimizer.state_dict())
    optimizer.load_state_dict(state["optimizer"])
    _, other = as_pytorch(2)
    assert_equal_states(other.state_dict(), optimizer.state_dict())
    loaded = state["optimizer"]
    theirs, other = as_pytorch(4)
    for step in range(2, 4):
        set_gradients(step, ours)
        optimizer.step()
    # The loaded state stays valid, too.
    assert_equal_states(as_pytorch(2)[1].state_dict(), loaded)
    assert_equal(theirs, ours)
    assert_equal_states(other.state_dict(), optimizer.state_dict())
    optimizer.close()


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    _, optimizer = stepped(tmp_path / "state")
    state = {"optimizer": optimizer.state_dict()}
    wrong = {
        **state["optimizer"],
        "state": {
            number: {**moments, "exp_avg": torch.zeros(3)}
            for number, moments in state["optimizer"]["state"].items()
        },
    }
    penstock.save(tmp_path / "checkpoint", {"optimizer": wrong})
    with pytest.raises(StateMismatchError, match=r"exp_avg"):
        penstock.load(tmp_path / "checkpoint", into=state)
    _, other = as_pytorch(2)
    assert_equal_states(other.state_dict(), optimizer.state_dict())
    optimizer.close()


@pytest.mark.parametrize("kind", [offload.AdamW, offload.SGD])
@pytest.mark.parametrize("masters", [False, True])
def test_a_training_is_resumed(tmp_path: Path, kind: Any, masters: bool) -> None:
    def begun(name: str) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(torch.bfloat16)
        optimizer = kind(model.parameters(), lr=1e-2, directory=tmp_path / name, masters=masters)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return penstock.Training(model=model, optimizer=optimizer, scheduler=scheduler)

    def train(training: Any, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            batch = torch.randn(4, 32, dtype=torch.bfloat16)
            training.optimizer.zero_grad()
            training.model(batch).square().mean().backward()
            training.optimizer.step()
            training.scheduler.step()

    straight = begun("straight")
    train(straight, range(8))
    first = begun("first")
    with penstock.CheckpointStore(tmp_path / "store") as store:
        train(first, range(5))
        store.save(5, first)
        train(first, range(5, 7))
        first.optimizer.close()
        second = begun("second")
        train(second, range(1))
        assert store.resume(second) == 5
        train(second, range(5, 8))
    assert_equal(list(straight.model.parameters()), list(second.model.parameters()))
    assert_equal_states(straight.optimizer.state_dict(), second.optimizer.state_dict())
    for one in (straight, second):
        one.optimizer.close()


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path / "state")
    model = nn.ParameterList(ours)
    training = penstock.Training(model=model, optimizer=optimizer)
    with penstock.CheckpointStore(tmp_path / "store") as store:
        store.save(2, training)
        set_gradients(2, ours)
        optimizer.step()
        store.save(3, training)
        shard = max(Path(store.path(3)).glob("shard-*"), key=lambda one: one.stat().st_size)
        with shard.open("r+b") as file:
            file.seek(9_000)
            file.write(b"damage")
        with pytest.warns(PenstockWarning, match="passed over"):
            assert store.resume(training) == 2
    theirs, other = as_pytorch(2)
    assert_equal(theirs, ours)
    assert_equal_states(other.state_dict(), optimizer.state_dict())
    optimizer.close()


def test_a_generation_is_a_checkpoint_and_comes_back(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path, steps=3)
    optimizer.close()
    generation = penstock.load(tmp_path / "rank-00000" / "generation")
    theirs, other = as_pytorch(3)
    moments = {int(number): one for number, one in generation["state"].items()}
    for number, one in other.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(one[name], moments[number][name])
    again = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    second = offload.AdamW(again, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    assert second.recover()
    set_gradients(3, again, theirs)
    second.step()
    other.step()
    assert_equal(theirs, again)
    second.close()
    third = offload.SGD(again, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    with pytest.raises(StateMismatchError, match="is of AdamW, not of SGD"):
        third.recover()
    third.close()
    fourth = offload.AdamW(again[:1], directory=tmp_path, memory_bytes=MEMORY_BYTES)
    with pytest.raises(StateMismatchError, match="has parameter 1, the optimizer 1"):
        fourth.recover()
    fourth.close()
    fifth = offload.AdamW(again, directory=tmp_path / "empty", memory_bytes=MEMORY_BYTES)
    assert not fifth.recover()
    fifth.close()
