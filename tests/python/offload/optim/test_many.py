"""Optimizers of many small parameters: work that is done once for all of them, not for each."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import penstock
from offload.optim.training_of import (
    MEMORY_BYTES,
    assert_equal,
    assert_equal_states,
    parameters,
    set_gradients,
    stepped,
)
from penstock import offload
from penstock.checkpoint.loading import load
from penstock.io.tensor_io import TensorIO
from penstock.offload.optim import state_dict

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = [((16, 16), (5,), (3, 7), (), (0, 2))[number % 5] for number in range(400)]


class Counted:
    """A native checkpoint that counts its reads.

    Attributes:
        fills: Number of tensors that each read has filled.
    """

    def __init__(self, native: Any, fills: list[int]) -> None:
        self._native = native
        self.fills = fills

    def fill(self, requests: list[Any], **options: Any) -> Any:
        self.fills.append(len(requests))
        return self._native.fill(requests, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the boxes that each read of a load fills."""
    found: list[int] = []

    def opened(*arguments: Any) -> Any:
        source = load_opened(*arguments)
        source.native = Counted(source.native, found)
        return source

    load_opened = load.OpenCheckpoint
    monkeypatch.setattr(load, "OpenCheckpoint", opened)
    return found


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the ranges that each write has."""
    found: list[int] = []

    def write_all(io: TensorIO, requests: Any, **options: Any) -> Any:
        found.append(len(requests))
        return whole(io, requests, **options)

    whole = TensorIO.write_all
    monkeypatch.setattr(TensorIO, "write_all", write_all)
    return found


made = functools.partial(stepped, shapes=SHAPES)


def test_many_tensors_are_read_at_once(tmp_path: Path, fills: list[int], writes: list[int]) -> None:
    _, optimizer = made(tmp_path / "state")
    penstock.save(tmp_path / "checkpoint", {"optimizer": optimizer.state_dict()})
    _, other = made(tmp_path / "other", steps=1)
    state = {"optimizer": other.state_dict()}
    writes.clear()
    reports: list[Any] = []
    penstock.load(tmp_path / "checkpoint", into=state, report=reports.append)
    # All non-empty tensors, of both moments; and one range in each of the files.
    assert fills == [2 * 4 * len(SHAPES) // 5]
    assert writes == [2]
    other.load_state_dict(state["optimizer"])
    assert writes == [2, 1, 1], "the headers"
    assert_equal_states(optimizer.state_dict(), other.state_dict())
    # Chunks that many tensors share are read once.
    assert reports[0].bytes_read < 2 * reports[0].bytes + (4 << 20)
    optimizer.close()
    other.close()


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_many_tensors_are_taken_over_at_once(tmp_path: Path, kind: str, writes: list[int]) -> None:
    _, optimizer = made(tmp_path / "state")
    state = optimizer.state_dict()
    if kind == "memory":
        penstock.save(tmp_path / "checkpoint", state)
        state = penstock.load(tmp_path / "checkpoint")
    _, other = made(tmp_path / "other", steps=0)
    writes.clear()
    other.load_state_dict(state)
    assert writes == [2, 1, 1]
    assert_equal_states(optimizer.state_dict(), other.state_dict())
    optimizer.close()
    other.close()


def test_a_piece_is_bounded(
    tmp_path: Path, fills: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict, "PIECE_BYTES", 64 << 10)
    ours = parameters()
    optimizer = offload.AdamW(ours, directory=tmp_path / "state", memory_bytes=MEMORY_BYTES)
    set_gradients(0, ours)
    optimizer.step()
    penstock.save(tmp_path / "checkpoint", optimizer.state_dict())
    state = optimizer.state_dict()
    penstock.load(tmp_path / "checkpoint", into=state)
    assert len(fills) >= sum(2 * 4 * one.numel() for one in ours) // (64 << 10)
    assert_equal_states(optimizer.state_dict(), state)
    optimizer.load_state_dict(state)
    penstock.save(tmp_path / "again", optimizer.state_dict())
    assert penstock.verify(tmp_path / "again").ok
    optimizer.close()


def test_states_of_several_steps_come_back_side_by_side(tmp_path: Path) -> None:
    ours, optimizer = made(tmp_path / "state", steps=1)
    first = optimizer.state_dict()
    set_gradients(1, ours)
    optimizer.step()
    second = optimizer.state_dict()
    penstock.save(tmp_path / "checkpoint", {"first": first, "second": second})
    wanted = penstock.load(tmp_path / "checkpoint")
    state = {"first": second, "second": first}
    penstock.load(tmp_path / "checkpoint", into=state)
    assert_equal_states(wanted["first"], state["first"])
    assert_equal_states(wanted["second"], state["second"])
    optimizer.load_state_dict(state["first"])
    assert_equal_states(wanted["first"], optimizer.state_dict())
    optimizer.close()


def test_what_failed_in_its_middle_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict, "PIECE_BYTES", 64 << 10)
    _, optimizer = made(tmp_path / "state")
    penstock.save(tmp_path / "checkpoint", optimizer.state_dict())
    state = optimizer.state_dict()
    _, other = made(tmp_path / "other", steps=0)
    state_import = other._stored.target(0, "exp_avg", None).filler
    wanted = [(number, moment) for number in range(400) for moment in ("exp_avg", "exp_avg_sq")]
    calls = []

    def read(memory: Any, boxes: Any) -> None:
        for box in boxes:
            number, moment = wanted[box.target]
            value = state["state"][number][moment].read()
            end = box.place + value.numel() * 4
            memory[box.place : end].view(torch.float32).copy_(value.view(-1))
        calls.append(len(boxes))
        if len(calls) == 3:
            raise RuntimeError("in its middle")

    with pytest.raises(RuntimeError, match="in its middle"):
        state_import.put(wanted, read)
    assert not state_import.has(0, "exp_avg")
    state_import.put(wanted, read)
    moments = {
        number: {
            "step": 2.0,
            **{
                moment: state_import.tensor(number, moment, None)
                for moment in ("exp_avg", "exp_avg_sq")
            },
        }
        for number in range(400)
    }
    other.load_state_dict({**state, "state": moments})
    assert_equal_states(optimizer.state_dict(), other.state_dict())
    penstock.save(tmp_path / "again", other.state_dict())
    assert penstock.verify(tmp_path / "again").ok
    optimizer.close()
    other.close()


def test_a_generation_is_described_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.offload.optim import generation

    described = []

    def flatten(state: Any) -> Any:
        described.append(len(state["state"]))
        return whole(state)

    whole = generation.flatten
    monkeypatch.setattr(generation, "flatten", flatten)
    ours, optimizer = made(tmp_path / "state", steps=0)
    theirs = parameters(shapes=SHAPES)
    other = torch.optim.AdamW(theirs, fused=True)
    for step in range(5):
        # Some take their first step later, so they are in no earlier generation.
        set_gradients(step, ours, theirs, without=lambda at, step=step: step < 2 and at < 7)
        optimizer.step()
        other.step()
    assert described == [len(SHAPES) - 7, len(SHAPES)]
    assert_equal(theirs, ours)
    optimizer.close()
    again = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    second = offload.AdamW(again, directory=tmp_path / "state", memory_bytes=MEMORY_BYTES)
    assert second.recover()
    assert_equal_states(other.state_dict(), second.state_dict())
    second.close()
