"""A `Training` refuses unsupported values when it is made, not at its first save."""

from __future__ import annotations

import random

import pytest
import torch

import penstock
from penstock.checkpoint.state.check import check_storable
from penstock.errors import UnsupportedStateError


class Odd:
    """A part with an unsupported value in its state."""

    def __init__(self, state):
        self.state = state
        self.asked = 0

    def state_dict(self):
        self.asked += 1
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state):
        self.state = state


def optimizer_with(**settings):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0].update(settings)
    return optimizer


def model_with_further_state():
    class Model(torch.nn.Linear):
        def get_extra_state(self):
            return {"hook": print}

        def set_extra_state(self, state):
            pass

    return Model(2, 2)


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        (lambda: {"optimizer": optimizer_with(hook=print)}, "optimizer.param_groups.0.hook"),
        (lambda: {"model": model_with_further_state()}, "model._extra_state.hook"),
        (lambda: {"averages": Odd({"decay": random.Random()})}, "averages.decay"),
        (lambda: {"two": [Odd({}), Odd({"x": [object()]})]}, "two.1.x.0"),
    ],
)
def test_a_part_that_cannot_be_saved_is_named_when_the_training_is_made(parts, key):
    with pytest.raises(UnsupportedStateError) as raised:
        penstock.Training(**parts())
    assert raised.value.key == key
    assert key in str(raised.value)


def test_a_part_that_is_set_later_is_looked_at_then():
    training = penstock.Training(optimizer=optimizer_with())
    with pytest.raises(UnsupportedStateError, match=r"optimizer\.param_groups\.0\.hook"):
        training.optimizer = optimizer_with(hook=print)


def test_what_has_no_state_or_no_memory_yet_is_taken():
    freed = torch.nn.Linear(2, 2)
    freed.weight.untyped_storage().resize_(0)
    with torch.device("meta"):
        meta = torch.nn.Linear(2, 2)
    training = penstock.Training(freed=freed, meta=meta, later=Odd(RuntimeError("not yet")))
    assert training.freed is freed
    assert training.meta is meta


def test_a_loader_is_not_asked_for_its_state():
    class Loader(Odd):
        def __iter__(self):
            return iter(())

    loader = Loader({"x": object()})
    penstock.Training(loader=loader)
    assert loader.asked == 0


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"a": [1, {"b": object()}]}, "a.1.b"),
        ({"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "w"),
        ({"w": torch.ones(2).to_mkldnn()}, "w"),
    ],
)
def test_plug_ins_can_ask_of_any_state(state, key):
    with pytest.raises(UnsupportedStateError) as raised:
        check_storable(state)
    assert raised.value.key == key


def test_what_can_be_stored_is_taken():
    check_storable({"w": torch.ones(2), "s": torch.eye(2).to_sparse(), "rest": (1, "a", {2})})
