"""Names of parameters: wrappers are recognized by type, and names stay unique."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import penstock
from compare import assert_same
from penstock.errors import UnsupportedStateError

torch.set_num_threads(1)

WORDS = ("_orig_mod", "module", "_checkpoint_wrapped_module")


class Odd(nn.Module):
    """A model with a child that has a wrapper's name for the wrapped module."""

    def __init__(self, word):
        super().__init__()
        self.add_module(word, nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)
        self.weight = nn.Parameter(torch.randn(3))
        self.word = word

    def forward(self, x):
        return self.head(getattr(self, self.word)(x * self.weight))


def compiled(model):
    return torch.compile(model, backend="eager")


def begin(model):
    return penstock.Training(model=model, optimizer=torch.optim.Adam(model.parameters()))


def step(training):
    training.model(torch.ones(2, 3)).square().mean().backward()
    training.optimizer.step()


@pytest.mark.parametrize("wrap", [lambda model: model, compiled, nn.DataParallel])
@pytest.mark.parametrize("word", WORDS)
def test_a_child_called_as_a_wrapper_calls_its_model_loses_nothing(tmp_path, word, wrap):
    training = begin(wrap(Odd(word)))
    step(training)
    plain = getattr(training.model, "_orig_mod" if wrap is compiled else "module", None)
    plain = training.model if wrap not in (compiled, nn.DataParallel) else plain
    penstock.save(tmp_path / "ckpt", training)
    stored = penstock.load(tmp_path / "ckpt")
    assert_same(stored["model"], plain.state_dict())
    assert set(stored["optimizer"]["state"]) == set(plain.state_dict())
    fresh = begin(wrap(Odd(word)))
    penstock.load(tmp_path / "ckpt", into=fresh)
    assert_same(fresh.state_dict(), training.state_dict())


def test_names_that_would_fall_together_stay_apart(tmp_path):
    """`outer.weight` and `outer._orig_mod.weight` are two parameters of one model."""
    model = nn.Module()
    model.outer = Odd("_orig_mod")
    before = copy.deepcopy(model.state_dict())
    penstock.save(tmp_path / "ckpt", penstock.Training(model=model))
    assert_same(penstock.load(tmp_path / "ckpt")["model"], before)


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("wrap", [compiled, checkpoint_wrapper, nn.DataParallel])
def test_what_a_wrapper_adds_is_left_out_wherever_it_is(tmp_path, wrap, is_inner):
    def wrapped(word):
        return nn.Sequential(wrap(Odd(word))) if is_inner else wrap(Odd(word))

    def plain(word):
        return nn.Sequential(Odd(word)) if is_inner else Odd(word)

    for word in WORDS:
        if wrap is checkpoint_wrapper and word == "_checkpoint_wrapped_module":
            # PyTorch itself removes the word from every name then.
            continue
        saved = begin(wrapped(word))
        step(saved)
        penstock.save(tmp_path / word, saved)
        other = begin(plain(word))
        penstock.load(tmp_path / word, into=other)
        assert list(other.state_dict()["model"]) == list(plain(word).state_dict())
        assert_same(other.state_dict(), saved.state_dict())


def test_a_tensor_of_the_wrapper_itself_is_refused_by_name():
    model = nn.DataParallel(nn.Linear(3, 3))
    model.register_buffer("seen", torch.zeros(1))
    with pytest.raises(UnsupportedStateError, match=r"model: DataParallel has 'seen'"):
        penstock.Training(model=model)


def test_two_parameters_of_one_name_are_refused_by_name():
    model = nn.Sequential(nn.DataParallel(nn.Linear(3, 3)))
    model[0].weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(UnsupportedStateError, match=r"two are called '0\.weight'"):
        penstock.Training(model=model).state_dict()


def test_models_with_keys_of_one_text_are_told_apart():
    """The keys 1 and "1" look alike; an optimizer may cover one model or both."""
    models = {1: nn.Linear(2, 2), "1": nn.Linear(2, 2)}
    for one in models.values():
        optimizer = torch.optim.SGD(one.parameters())
        training = penstock.Training(models=models, optimizer=optimizer)
        assert training.state_dict()["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    both = [parameter for one in models.values() for parameter in one.parameters()]
    training = penstock.Training(models=models, optimizer=torch.optim.SGD(both))
    with pytest.raises(UnsupportedStateError, match=r"two are called 'models\.1\.weight'"):
        training.state_dict()
