"""`penstock.offload.AdamW` and `SGD` compute the same bits as PyTorch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from offload.optim.training_of import (
    MEMORY_BYTES,
    assert_equal,
    assert_equal_states,
    parameters,
    set_gradients,
)
from penstock import offload

if TYPE_CHECKING:
    from pathlib import Path

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 256 << 20])
@pytest.mark.parametrize("dtype", TYPES)
def test_adamw_is_that_of_pytorch(tmp_path: Path, dtype: Any, memory_bytes: int) -> None:
    theirs, ours = parameters(dtype), parameters(dtype)
    one = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    other = offload.AdamW(ours, lr=1e-2, directory=tmp_path, memory_bytes=memory_bytes)
    for step in range(4):
        # Some parameters have no gradient at first, some never.
        set_gradients(step, theirs, ours, without=lambda at, step=step: at == 8 or at == 4 > step)
        one.step()
        other.step()
    assert_equal(theirs, ours)
    assert_equal_states(one.state_dict(), other.state_dict())
    other.close()


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True, "weight_decay": 0.0},
        {"betas": (0.5, 0.7), "eps": 1e-3, "amsgrad": True},
        {"lr": torch.tensor(1e-2)},
    ],
)
def test_options_of_adamw(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs, ours = parameters(), parameters()
    one = torch.optim.AdamW(theirs, **options, fused=True)
    other = offload.AdamW(ours, **options, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    for step in range(3):
        set_gradients(step, theirs, ours)
        one.step()
        other.step()
    assert_equal(theirs, ours)
    assert_equal_states(one.state_dict(), other.state_dict())
    other.close()


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    ],
)
def test_sgd_is_that_of_pytorch(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs, ours = parameters(), parameters()
    one = torch.optim.SGD(theirs, lr=1e-2, **options, fused=True)
    other = offload.SGD(ours, lr=1e-2, **options, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    for step in range(4):
        set_gradients(step, theirs, ours)
        one.step()
        other.step()
    assert_equal(theirs, ours)
    assert_equal_states(one.state_dict(), other.state_dict())
    other.close()


def test_a_hundred_steps_with_groups_clipping_a_schedule_and_skips(tmp_path: Path) -> None:
    shapes = ((33, 65), (64, 64), (129,), (16,))
    theirs, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    kept = []
    for some, make in (
        (theirs, lambda groups: torch.optim.AdamW(groups, fused=True)),
        (ours, lambda groups: offload.AdamW(groups, directory=tmp_path)),
    ):
        groups = [
            {"params": some[:2], "lr": 1e-2, "weight_decay": 0.1},
            {"params": some[2:], "lr": 1e-3, "amsgrad": True},
        ]
        optimizer = make(groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [1e-2, 1e-3], total_steps=110, cycle_momentum=True
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
        kept.append((some, optimizer, schedule, scaler))
    for step in range(100):
        set_gradients(step, theirs, ours)
        for some, optimizer, schedule, scaler in kept:
            scaler.scale(torch.zeros(()))
            for one in some:
                one.grad *= scaler.get_scale()
            if step % 9 == 4:
                some[0].grad[0, 0] = float("inf")
            if step % 2:
                # In every second step the optimizer itself divides by the scale.
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(some, 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
    assert_equal(theirs, ours)
    assert_equal_states(kept[0][1].state_dict(), kept[1][1].state_dict())
    assert kept[1][1].state[ours[0]]["step"] < 100
    kept[1][1].close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_parameters_in_single_precision(tmp_path: Path, dtype: Any) -> None:
    ours = parameters(dtype)
    theirs = [torch.nn.Parameter(one.detach().float()) for one in ours]
    one = torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    other = offload.AdamW(ours, lr=1e-3, directory=tmp_path, masters=True)
    for step in range(3):
        set_gradients(step, ours)
        for their, our in zip(theirs, ours, strict=True):
            their.grad = our.grad.float()
        one.step()
        other.step()
    assert_equal([their.to(dtype) for their in theirs], ours)
    state = other.state_dict()["state"]
    assert_equal(theirs, [state[number]["master"].read() for number in range(len(ours))])
    assert_equal_states(one.state_dict(), other.state_dict())
    other.close()


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_any_number_of_threads(tmp_path: Path, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        theirs, ours = parameters(), parameters()
        one = torch.optim.AdamW(theirs, fused=True)
        other = offload.AdamW(ours, directory=tmp_path, memory_bytes=MEMORY_BYTES)
        for step in range(2):
            set_gradients(step, theirs, ours)
            one.step()
            other.step()
        assert_equal(theirs, ours)
        assert_equal_states(one.state_dict(), other.state_dict())
        other.close()
    finally:
        torch.set_num_threads(before)


def test_defaults_of_pytorch_change_nothing(tmp_path: Path) -> None:
    theirs, ours = parameters(shapes=[(4,)]), parameters(shapes=[(4,)])
    one = torch.optim.AdamW(theirs, fused=True)
    other = offload.AdamW(ours, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    set_gradients(0, theirs, ours)
    torch.set_default_dtype(torch.bfloat16)
    try:
        # At a count that bfloat16 cannot increment.
        for optimizer in (one, other):
            optimizer.step()
            state = optimizer.state_dict()
            state["state"][0]["step"] = 256.0
            optimizer.load_state_dict(state)
        for _ in range(2):
            one.step()
        with torch.device("meta"):
            for _ in range(2):
                other.step()
            other.load_state_dict(other.state_dict())
            assert other.state_dict()["state"][0]["exp_avg"].read().device.type == "cpu"
        other.close()
        again = offload.AdamW(ours, directory=tmp_path, memory_bytes=MEMORY_BYTES)
        assert again.recover()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(theirs, ours)
    assert_equal_states(one.state_dict(), again.state_dict())
    again.close()


def test_a_step_counts_in_single_precision_from_the_first_on(tmp_path: Path) -> None:
    ours = parameters(shapes=[(4,)])
    optimizer = offload.AdamW(ours, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    set_gradients(0, ours)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    step = optimizer.state[ours[0]]["step"]
    assert (step.dtype, step.device.type) == (torch.float32, "cpu")
    optimizer.close()


def test_a_state_that_was_taken_away_begins_anew(tmp_path: Path) -> None:
    theirs, ours = parameters(), parameters()
    one = torch.optim.AdamW(theirs, fused=True)
    other = offload.AdamW(ours, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    for step in range(4):
        if step == 2:
            for some, optimizer in ((theirs, one), (ours, other)):
                del optimizer.state[some[0]]
        set_gradients(step, theirs, ours)
        one.step()
        other.step()
    assert_equal(theirs, ours)
    assert_equal_states(one.state_dict(), other.state_dict())
    other.close()


def test_steps_in_inference_mode(tmp_path: Path) -> None:
    theirs, ours = parameters(), parameters()
    one = torch.optim.AdamW(theirs, fused=True)
    other = offload.AdamW(ours, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    for step in range(2):
        set_gradients(step, theirs, ours)
        with torch.inference_mode():
            one.step()
            other.step()
    assert_equal(theirs, ours)
    other.close()


def test_there_may_be_more_memory_than_there_is_state(tmp_path: Path) -> None:
    theirs, ours = parameters(), parameters()
    one = torch.optim.AdamW(theirs[:1], fused=True)
    other = offload.AdamW(ours[:1], directory=tmp_path, memory_bytes=1 << 50)
    for step in range(2):
        if step == 1:
            one.add_param_group({"params": theirs[1:]})
            other.add_param_group({"params": ours[1:]})
        set_gradients(step, theirs, ours)
        one.step()
        other.step()
    assert_equal(theirs, ours)
    other.close()


def test_a_closure_is_called_once_with_gradients(tmp_path: Path) -> None:
    ours = parameters(shapes=[(4, 4)])
    optimizer = offload.AdamW(ours, directory=tmp_path)
    calls = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (ours[0] ** 2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert optimizer.state[ours[0]]["step"] == 1
    optimizer.close()


def test_groups_can_be_added(tmp_path: Path) -> None:
    theirs, ours = parameters(), parameters()
    one = torch.optim.AdamW(theirs[:3], fused=True)
    other = offload.AdamW(ours[:3], directory=tmp_path, memory_bytes=MEMORY_BYTES)
    for step in range(4):
        if step == 2:
            one.add_param_group({"params": theirs[3:], "lr": 1e-2})
            other.add_param_group({"params": ours[3:], "lr": 1e-2})
        set_gradients(step, theirs, ours)
        one.step()
        other.step()
    assert_equal(theirs, ours)
    assert_equal_states(one.state_dict(), other.state_dict())
    other.close()


def test_hooks_of_steps_are_called(tmp_path: Path) -> None:
    ours = parameters(shapes=[(4,)])
    optimizer = offload.AdamW(ours, directory=tmp_path)
    told = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("behind"))
    set_gradients(0, ours)
    optimizer.step()
    assert told == ["before", "behind"]
    optimizer.close()
