"""Trainings with optimizer moments in files: saved by links, resumed into new files."""

from __future__ import annotations

import gc
import os
from itertools import count
from pathlib import Path

import pytest
import torch

import penstock
from held_files import Held, Target
from penstock.checkpoint.loading.target import is_sharded
from penstock.errors import PenstockWarning
from penstock.tensors.file_tensor import FileTensor

_NUMBERS = count()


class InFiles(torch.optim.SGD):
    """Keeps momentum in files, one for each parameter."""

    def __init__(self, parameters, directory):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self._directory = Path(directory)
        self.asked = []

    def _path(self):
        return self._directory / f"moment-{os.getpid()}-{next(_NUMBERS)}"

    def keep(self):
        """Moves the momentum from memory into files."""
        for parameter, state in self.state.items():
            moment = state["momentum_buffer"]
            like = parameter if is_sharded(parameter) else None
            local = moment.to_local() if like is not None else moment
            held = Held(self._path(), {"momentum_buffer": local})
            state["momentum_buffer"] = held.tensor("momentum_buffer", like)

    def moments(self):
        found = [self.state[one].get("momentum_buffer") for one in self.param_groups[0]["params"]]
        return [one.read() for one in found]

    def _file_target(self, parameter, key, dtype, shape):
        self.asked.append((key, dtype, tuple(shape)))
        if key != "momentum_buffer":
            return None
        like = parameter if is_sharded(parameter) else None
        local = parameter.to_local() if like is not None else parameter
        return Target(self._path(), dtype, tuple(local.shape), like)


def make(directory, *, steps):
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 3))
    optimizer = InFiles(model.parameters(), directory)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 30)).square().sum().backward()
        optimizer.step()
    if steps:
        optimizer.keep()
    return model, optimizer


def parts(model, optimizer, has_model):
    return {"model": model, "optimizer": optimizer} if has_model else {"optimizer": optimizer}


@pytest.mark.parametrize("has_model", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_training_is_resumed_into_files(tmp_path, has_model, steps):
    store = penstock.CheckpointStore(tmp_path / "store")
    model, optimizer = make(tmp_path, steps=1)
    report = store.save(1, penstock.Training(**parts(model, optimizer, has_model)))
    assert report.linked_bytes > 0
    fresh, other = make(tmp_path, steps=steps)
    assert store.resume(penstock.Training(**parts(fresh, other, has_model))) == 1
    assert all(isinstance(state["momentum_buffer"], FileTensor) for state in other.state.values())
    for found, expected in zip(other.moments(), optimizer.moments(), strict=True):
        assert torch.equal(found, expected)
    assert ("momentum_buffer", torch.float32, (40, 30)) in other.asked
    # Saves again, from the new files.
    assert store.save(2, penstock.Training(**parts(fresh, other, has_model))).linked_bytes > 0
    del optimizer, other, model, fresh
    gc.collect()
    assert os.listdir(tmp_path) == ["store"]


def test_what_was_saved_from_memory_is_resumed_into_files_and_back(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")
    model, optimizer = make(tmp_path, steps=1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter, moment in zip(model.parameters(), optimizer.moments(), strict=True):
        plain.state[parameter]["momentum_buffer"] = moment
    store.save(1, penstock.Training(model=model, optimizer=plain))
    fresh, other = make(tmp_path, steps=0)
    store.resume(penstock.Training(model=fresh, optimizer=other))
    store.save(2, penstock.Training(model=fresh, optimizer=other))
    last, back = make(tmp_path, steps=0)
    back = torch.optim.SGD(last.parameters(), lr=0.1, momentum=0.9)
    store.resume(penstock.Training(model=last, optimizer=back))
    for parameter, expected in zip(last.parameters(), optimizer.moments(), strict=True):
        assert torch.equal(back.state[parameter]["momentum_buffer"], expected)


def test_a_damaged_step_is_passed_over(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (1, 2):
        model, optimizer = make(tmp_path, steps=step)
        if step == 1:
            expected = optimizer.moments()
        store.save(step, penstock.Training(model=model, optimizer=optimizer))
    shard = sorted((tmp_path / "store" / "step-0000000002").glob("shard-*"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    fresh, other = make(tmp_path, steps=0)
    with pytest.warns(PenstockWarning, match="step 2"):
        assert store.resume(penstock.Training(model=fresh, optimizer=other)) == 1
    for found, moment in zip(other.moments(), expected, strict=True):
        assert torch.equal(found, moment)
    del model, optimizer, fresh, other
    gc.collect()
    assert os.listdir(tmp_path) == ["store"]
