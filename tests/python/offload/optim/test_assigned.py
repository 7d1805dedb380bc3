"""States of stored optimizers that the caller or another thread changes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from offload.optim.training_of import (
    MEMORY_BYTES,
    SMALL,
    assert_equal,
    assert_equal_states,
    parameters,
    set_gradients,
)
from penstock import offload
from penstock.errors import StateMismatchError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

ADAMW = ("exp_avg", "exp_avg_sq")
SGD = ("momentum_buffer",)


def pair(directory: Path, kind: str, **options: Any) -> tuple[list[Any], list[Any], Any, Any]:
    """Returns the same parameters twice, with PyTorch's optimizer and Penstock's."""
    theirs, ours = parameters(shapes=SMALL), parameters(shapes=SMALL)
    if kind == "SGD":
        options = {"lr": 0.1, "momentum": 0.9, **options}
    other = getattr(torch.optim, kind)(theirs, fused=True, **options)
    one = getattr(offload, kind)(ours, directory=directory, memory_bytes=MEMORY_BYTES, **options)
    return theirs, ours, other, one


def moment(of: Any, seed: int) -> Any:
    return torch.rand(of.shape, generator=torch.Generator().manual_seed(seed)) + 0.5


@pytest.mark.parametrize(("kind", "moments"), [("AdamW", ADAMW), ("SGD", SGD)])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_assigned_moments_are_those_of_the_next_step(
    tmp_path: Path, kind: str, moments: tuple[str, ...], has_gradient: bool
) -> None:
    theirs, ours, other, one = pair(tmp_path, kind)
    for step in range(6):
        is_without = step == 2 and not has_gradient
        set_gradients(step, theirs, ours, without=lambda index, no=is_without: no and index == 0)
        if step == 2:
            for name in moments:
                other.state[theirs[0]][name] = moment(theirs[0], 7)
                one.state[ours[0]][name] = moment(ours[0], 7)
            assert_equal_states(other.state_dict(), one.state_dict())
        other.step()
        one.step()
        assert_equal(theirs, ours)
        assert_equal_states(other.state_dict(), one.state_dict())
    one.close()
    again = pair(tmp_path, kind)[-1]
    assert again.recover()
    assert_equal_states(other.state_dict(), again.state_dict())
    again.close()


def test_a_whole_state_can_be_assigned_before_the_first_step(tmp_path: Path) -> None:
    theirs, ours, other, one = pair(tmp_path, "AdamW")
    for optimizer, some in ((other, theirs), (one, ours)):
        for number, parameter in enumerate(some):
            optimizer.state[parameter] = {
                "step": torch.tensor(4.0),
                **{name: moment(parameter, number) for name in ADAMW},
            }
    for step in range(3):
        set_gradients(step, theirs, ours)
        other.step()
        one.step()
    assert_equal(theirs, ours)
    assert_equal_states(other.state_dict(), one.state_dict())
    one.close()


def test_masters_are_the_parameters_where_a_whole_state_is_assigned(tmp_path: Path) -> None:
    ours = parameters(torch.bfloat16, SMALL)
    before = [one.detach().clone() for one in ours]
    one = offload.AdamW(
        ours, lr=0.0, weight_decay=0.0, directory=tmp_path, memory_bytes=MEMORY_BYTES, masters=True
    )
    for parameter in ours:
        one.state[parameter] = {
            "step": torch.tensor(1.0),
            **{name: moment(parameter, 0) for name in ADAMW},
        }
    set_gradients(0, ours)
    one.step()
    assert_equal(before, ours)
    one.close()


def test_momentum_can_be_assigned_before_the_first_step(tmp_path: Path) -> None:
    theirs, ours, other, one = pair(tmp_path, "SGD")
    for optimizer, some in ((other, theirs), (one, ours)):
        for parameter in some:
            optimizer.state[parameter]["momentum_buffer"] = moment(parameter, 3)
    for step in range(3):
        set_gradients(step, theirs, ours)
        other.step()
        one.step()
    assert_equal(theirs, ours)
    one.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exp_avg": torch.zeros(3)}, r"'exp_avg' of parameter 1 is \[3\]"),
        ({"exp_avg": torch.zeros(17, dtype=torch.float64)}, "float64; the optimizer keeps"),
        ({"exp_avg": None}, "is NoneType, no tensor: to begin anew"),
        ({"slow": torch.zeros(17)}, "has 'slow', which this optimizer does not store"),
        ({"step": "many"}, "the step of parameter 1 is no number"),
        ({"step": float("nan")}, "the step of parameter 1 is nan"),
        ({"step": -1}, "the step of parameter 1 is -1"),
    ],
)
def test_a_state_that_cannot_be_taken_is_named_and_nothing_changes(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    theirs, ours, other, one = pair(tmp_path, "AdamW")
    set_gradients(0, theirs, ours)
    other.step()
    one.step()
    kept = dict(one.state[ours[1]])
    one.state[ours[1]].update(given)
    set_gradients(1, theirs, ours)
    with pytest.raises(StateMismatchError, match=message):
        one.step()
    one.state[ours[1]] = kept
    other.step()
    one.step()
    assert_equal(theirs, ours)
    assert_equal_states(other.state_dict(), one.state_dict())
    one.close()


def test_moments_without_a_count_are_refused_as_by_pytorch(tmp_path: Path) -> None:
    _, ours, _, one = pair(tmp_path, "AdamW")
    one.state[ours[0]]["exp_avg"] = moment(ours[0], 0)
    set_gradients(0, ours)
    with pytest.raises(StateMismatchError, match="moments and no 'step'"):
        one.step()
    one.state[ours[0]] = {"step": torch.tensor(1.0), "exp_avg": moment(ours[0], 0)}
    with pytest.raises(StateMismatchError, match="'step' and no 'exp_avg_sq'"):
        one.step()
    with pytest.raises(StateMismatchError, match="'step' and no 'exp_avg_sq'"):
        one.state_dict()
    one.close()


def test_a_count_can_be_assigned_as_a_number(tmp_path: Path) -> None:
    theirs, ours, other, one = pair(tmp_path, "AdamW")
    for step in range(3):
        if step == 1:
            other.state[theirs[0]]["step"] = torch.tensor(9.0)
            one.state[ours[0]]["step"] = 9
        set_gradients(step, theirs, ours)
        other.step()
        one.step()
    assert_equal(theirs, ours)
    assert_equal_states(other.state_dict(), one.state_dict())
    one.close()


def test_a_parameter_that_was_swapped_is_an_error_that_names_its_shape(tmp_path: Path) -> None:
    _, ours, _, one = pair(tmp_path, "AdamW")
    one.param_groups[0]["params"][1] = torch.nn.Parameter(torch.zeros(17))
    one.param_groups[0]["params"][1].grad = torch.zeros(17)
    for call in (one.step, one.state_dict):
        with pytest.raises(StateMismatchError, match=r"shape \[17\] was put into") as found:
            call()
        assert len(str(found.value)) < 200
    one.param_groups[0]["params"][1] = ours[1]
    set_gradients(0, ours)
    one.step()
    one.close()


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_parameter_that_is_there_twice_is_an_error_and_changes_nothing(
    tmp_path: Path, kind: str
) -> None:
    """PyTorch would step it twice, from the moments of its first step."""
    _, ours, _, one = pair(tmp_path, kind)
    set_gradients(0, ours)
    before = [tensor.clone() for tensor in ours]
    one.param_groups[0]["params"].append(ours[1])
    for call in (one.step, one.state_dict):
        with pytest.raises(StateMismatchError, match="parameter 1 is in the groups twice"):
            call()
    assert_equal(ours, before)
    one.param_groups[0]["params"].pop()
    one.step()
    one.close()


def test_moments_follow_parameters_that_change_their_places(tmp_path: Path) -> None:
    theirs, ours, other, one = pair(tmp_path, "AdamW")
    set_gradients(0, theirs, ours)
    other.step()
    one.step()
    for optimizer in (other, one):
        optimizer.param_groups[0]["params"].reverse()
    assert_equal_states(other.state_dict(), one.state_dict())
    one.close()


def test_threads_take_turns(tmp_path: Path) -> None:
    _, ours, _, one = pair(tmp_path, "AdamW")
    set_gradients(0, ours)
    one.step()
    failures: list[BaseException] = []
    is_over = threading.Event()

    def step() -> None:
        try:
            for _ in range(10):
                one.step()
        except BaseException as error:
            failures.append(error)

    def look() -> None:
        try:
            while not is_over.is_set():
                counts = {float(state["step"]) for state in one.state_dict()["state"].values()}
                assert len(counts) == 1, counts
        except BaseException as error:
            failures.append(error)

    looking = threading.Thread(target=look)
    stepping = [threading.Thread(target=step) for _ in range(3)]
    looking.start()
    for thread in stepping:
        thread.start()
    for thread in stepping:
        thread.join()
    is_over.set()
    looking.join()
    assert not failures
    counts = [float(state["step"]) for state in one.state_dict()["state"].values()]
    assert counts == [31.0] * len(SMALL)
    one.close()


def test_a_directory_that_was_moved_is_named_and_can_be_moved_back(tmp_path: Path) -> None:
    theirs, ours, other, one = pair(tmp_path / "state", "AdamW")
    for step in range(2):
        set_gradients(step, theirs, ours)
        other.step()
        one.step()
    (tmp_path / "state").rename(tmp_path / "away")
    set_gradients(2, theirs, ours)
    with pytest.raises(StorageError, match="was moved or removed since the optimizer"):
        one.step()
    (tmp_path / "away").rename(tmp_path / "state")
    other.step()
    one.step()
    assert_equal(theirs, ours)
    assert_equal_states(other.state_dict(), one.state_dict())
    one.close()
