"""Optimizers and lazy saves: a guarded step copies first; without a guard the save fails."""

from __future__ import annotations

import copy
import os
import time

import pytest
import torch

import penstock
from background import held
from compare import assert_same
from penstock.errors import StateMismatchError

pytestmark = pytest.mark.quick

STEPS = int(os.environ.get("PENSTOCK_TORTURE_STEPS", "60"))
"""Optimizer steps that race with lazy saves, for each optimizer; the variable sets more."""


torch.set_num_threads(1)


def step_once(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def make_training(kind):
    """Returns a model and an optimizer that changes every element at each step."""
    torch.manual_seed(3)
    # Some tensors are small enough to be copied by the call itself.
    model = torch.nn.Sequential(torch.nn.Linear(301, 200), torch.nn.Linear(200, 100))
    return model, OPTIMIZERS[kind](model.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_without_a_guard_fails_the_save(disk_path, kind):
    """Also a fused optimizer, whose changes PyTorch does not count."""
    store = penstock.CheckpointStore(disk_path / "store")
    model, optimizer = make_training(kind)
    step_once(optimizer)
    states = [model.state_dict(), [model.state_dict(), optimizer.state_dict()]]
    states.append(optimizer.state_dict())
    for step, state in enumerate(states):
        with held(store, step):
            pending = store.save_async(step, state, lazy=True)
            step_once(optimizer)
        assert isinstance(pending.exception(), StateMismatchError)
    assert store.steps() == []


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_of_an_optimizer_fails_no_save_that_it_does_not_change(disk_path, kind):
    store = penstock.CheckpointStore(disk_path / "store")
    model, optimizer = make_training(kind)
    _, stranger = make_training(kind)
    expected = copy.deepcopy(model.state_dict())
    with held(store, 1):
        pending = store.save_async(1, model.state_dict(), lazy=True)
        step_once(stranger)
        # `stage` makes the step as safe as a guard does.
        pending.stage()
        step_once(optimizer)
    pending.result()
    assert_same(store.load(1), expected)
    step_once(optimizer)
    expected = copy.deepcopy(model.state_dict())
    with held(store, 2) as release:
        pending = store.save_async(2, model.state_dict(), lazy=True)
        release()
        assert pending.wait_staged()
        step_once(optimizer)
    pending.result()
    assert_same(store.load(2), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_guard_makes_the_step_copy_first(disk_path, kind):
    store = penstock.CheckpointStore(disk_path / "store")
    model, optimizer = make_training(kind)
    step_once(optimizer)
    guard = penstock.guard(optimizer)
    state = [model.state_dict(), optimizer.state_dict()]
    expected = copy.deepcopy(state)
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        step_once(optimizer)
        assert guard.waited_seconds > 0
        assert pending.wait_staged(0)
        assert not pending.done()
    pending.result()
    assert_same(store.load(1), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_guard_that_is_removed_guards_no_more(disk_path, kind):
    store = penstock.CheckpointStore(disk_path / "store")
    model, optimizer = make_training(kind)
    guards = [penstock.guard(optimizer) for _ in range(2)]
    for step, guard in enumerate(guards):
        guard.remove()
        with held(store, step):
            pending = store.save_async(step, model.state_dict(), lazy=True)
            step_once(optimizer)
        error = pending.exception()
        assert isinstance(error, StateMismatchError if step else type(None))


def test_a_guard_waits_for_the_saves_of_every_store(disk_path):
    stores = [penstock.CheckpointStore(disk_path / name) for name in "ab"]
    model, optimizer = make_training("adamw")
    penstock.guard(optimizer)
    expected = copy.deepcopy(model.state_dict())
    with held(stores[0], 1), held(stores[1], 1):
        pending = [store.save_async(1, model.state_dict(), lazy=True) for store in stores]
        step_once(optimizer)
    for one, store in zip(pending, stores, strict=True):
        one.result()
        assert_same(store.load(), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_that_race_with_lazy_saves_never_tear_one(memory_path, kind):
    store = penstock.CheckpointStore(memory_path / "store")
    model, optimizer = make_training(kind)
    step_once(optimizer)
    guard = penstock.guard(optimizer)
    saved = []

    def check(step, expected):
        assert_same(store.load(step), expected)
        store.delete(step, force=True)

    for step in range(STEPS):
        state = [model.state_dict(), optimizer.state_dict(), step]
        saved.append((step, copy.deepcopy(state)))
        store.save_async(step, state, lazy=True)
        if step % 3 == 1:
            # Lets the save proceed further before the step.
            time.sleep(0.0005 * (step % 5))
        step_once(optimizer)
        if len(saved) > 1:
            check(*saved.pop(0))
    store.wait()
    check(*saved.pop())
    assert guard.waited_seconds > 0
    assert store.steps() == []
