"""Tensors of a training that share memory: all get the checkpoint's values, or none does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.errors import StateMismatchError

torch.set_num_threads(1)


class Speaker(nn.Module):
    """An embedding and a head, which may be one parameter."""

    def __init__(self, tie):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        if tie == "tied":
            self.head.weight = self.embed.weight
        elif tie == "window":
            self.head.weight = nn.Parameter(self.embed.weight.detach().flatten().view(4, 3))
        elif tie == "rows":
            self.head = nn.Linear(3, 2, bias=False)
            self.head.weight = nn.Parameter(self.embed.weight.detach()[1:3])


def assert_equal(one, other):
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def saved(tmp_path, **parts):
    penstock.save(tmp_path / "ckpt", penstock.Training(rng=False, **parts))
    return tmp_path / "ckpt"


@pytest.mark.parametrize("tie", ["tied", "window"])
def test_two_tensors_do_not_come_into_the_memory_of_one(tmp_path, tie):
    path = saved(tmp_path, model=Speaker("apart"))
    tied = Speaker(tie)
    before = {name: value.clone() for name, value in tied.state_dict().items()}
    match = "model: embed.weight: shares memory with head.weight in the training"
    with pytest.raises(StateMismatchError, match=match):
        penstock.load(path, into=penstock.Training(rng=False, model=tied))
    store = penstock.CheckpointStore(tmp_path / "store")
    store.save(1, penstock.Training(rng=False, model=Speaker("apart")))
    with pytest.raises(StateMismatchError, match=match):
        store.resume(penstock.Training(rng=False, model=tied))
    assert_equal(tied.state_dict(), before)


def test_equal_elements_of_two_tensors_come_into_the_memory_of_one(tmp_path):
    apart, tied = Speaker("apart"), Speaker("tied")
    apart.head.weight.data.copy_(apart.embed.weight.data)
    path = saved(tmp_path, model=apart)
    penstock.load(path, into=penstock.Training(rng=False, model=tied))
    assert_equal(tied.state_dict(), apart.state_dict())
    assert tied.head.weight is tied.embed.weight


def test_a_window_gets_its_part_and_no_other(tmp_path):
    rows = Speaker("rows")
    path = saved(tmp_path, model=rows)
    fresh = Speaker("rows")
    penstock.load(path, into=penstock.Training(rng=False, model=fresh))
    assert_equal(fresh.state_dict(), rows.state_dict())
    other = Speaker("rows")
    other.head.weight = nn.Parameter(other.head.weight.detach() + 1)
    path = saved(tmp_path / "other", model=other)
    with pytest.raises(StateMismatchError, match=r"embed.weight: shares memory with head"):
        penstock.load(path, into=penstock.Training(rng=False, model=fresh))


def test_what_was_tied_comes_into_two_tensors_with_the_elements_of_both(tmp_path):
    tied, apart = Speaker("tied"), Speaker("apart")
    penstock.load(saved(tmp_path, model=tied), into=penstock.Training(rng=False, model=apart))
    assert_equal(apart.state_dict(), tied.state_dict())


@pytest.mark.parametrize("kind", ["models", "value", "array", "nested"])
def test_parts_that_share_a_tensor_are_compared_with_each_other(tmp_path, kind):
    def parts(is_tied):
        one = nn.Linear(2, 2, bias=False)
        other = nn.Linear(2, 2, bias=False)
        if kind == "models":
            if is_tied:
                other.weight = one.weight
            return {"models": [one, other]}
        if kind == "value":
            return {"model": one, "copy": one.weight.detach() if is_tied else torch.ones(2, 2)}
        first, second = np.zeros(3), np.ones(3)
        second = first if is_tied else second
        if kind == "array":
            return {"first": first, "second": second}
        return {"tables": {"first": [first], "second": [second]}}

    path = saved(tmp_path, **parts(False))
    with pytest.raises(StateMismatchError, match="shares memory with"):
        penstock.load(path, into=penstock.Training(rng=False, **parts(True)))
    path = saved(tmp_path / "tied", **parts(True))
    penstock.load(path, into=penstock.Training(rng=False, **parts(True)))
