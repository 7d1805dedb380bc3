"""The elements of a state that DCP asks for their states, with `enable`."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver

import penstock
from penstock.integrations.dcp import enable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Counter:
    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": torch.tensor(self.count)}

    def load_state_dict(self, state):
        self.count = int(state["count"])


class StatefulTensor(torch.Tensor):
    def state_dict(self):
        return {"of": "a subclass"}

    def load_state_dict(self, state):
        pass


def test_all_that_have_a_state_are_asked_and_the_order_stays():
    marked = torch.ones(1)
    marked.state_dict = lambda: {"of": "an instance"}
    marked.load_state_dict = lambda _: None
    state = {
        "a": torch.zeros(2),
        "counter": Counter(3),
        "b": [1, Counter(4)],
        "sub": torch.ones(2).as_subclass(StatefulTensor),
        "module": torch.nn.Linear(1, 1),
        "c": None,
        "marked": marked,
    }
    theirs = state_dict_saver._stateful_to_state_dict(state)
    with enable():
        assert state_dict_saver._stateful_to_state_dict is not theirs
        ours = state_dict_saver._stateful_to_state_dict(state)
    assert list(ours) == list(theirs) == list(state)
    assert ours["counter"] == theirs["counter"] == {"count": torch.tensor(3)}
    assert ours["sub"] == theirs["sub"] == {"of": "a subclass"}
    assert set(ours["module"]) == set(theirs["module"]) == {"weight", "bias"}
    for name in "abc":
        assert ours[name] is state[name]
    assert ours["marked"] == theirs["marked"]


def test_a_state_with_such_elements_comes_back(tmp_path):
    with enable():
        dcp.save({"w": torch.ones(2), "counter": Counter(5)}, checkpoint_id=tmp_path / "step")
        counter = Counter(0)
        dcp.load({"w": torch.zeros(2), "counter": counter}, checkpoint_id=tmp_path / "step")
    assert counter.count == 5
    assert penstock.load(tmp_path / "step")["w"].tolist() == [1, 1]


def test_who_listens_to_the_log_of_dcp_hears_of_every_element():
    logger = pytest.importorskip("torch.distributed.checkpoint.logger")._dcp_logger
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.msg["func_name"])
    logger.addHandler(handler)
    try:
        with enable():
            state_dict_saver._stateful_to_state_dict({"w": torch.ones(1)})
    finally:
        logger.removeHandler(handler)
    assert any(name.endswith(".w") for name in heard)
