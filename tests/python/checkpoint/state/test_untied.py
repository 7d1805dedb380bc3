"""Shared memory in a state is tied again at load, or the report says that it is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import penstock


def base():
    return torch.arange(24.0)


UNTIED = {
    "in part": lambda: {"a": base()[:6], "b": (x := base())[3:9], "c": x[5:12]},
    "strided, without the base": lambda: {"a": (x := base().view(4, 6))[:, :4], "b": x[:, 2:]},
    "as another type": lambda: {"a": (x := base()), "b": x.view(torch.int32)},
    "an array and a tensor": lambda: {"a": (x := base())[:6], "b": x.numpy()[3:9]},
    "arrays": lambda: {"a": (x := np.arange(9.0))[::2], "b": x[::3]},
}
TIED = {
    "windows of a base": lambda: {"w": (x := base().view(4, 6)), "a": x[:, :4], "b": x[:, 2:]},
    "one in the other": lambda: {"a": (x := base())[2:12], "b": x[4:6]},
    "twice": lambda: {"a": (x := base().view(4, 6)[:, ::2]), "b": x},
}
APART = {
    "columns beside each other": lambda: {str(n): x for n, x in enumerate(base().view(6, 4).T)},
    "interleaved": lambda: {"a": (x := base())[::2], "b": x[1::2]},
    "neighbours": lambda: {"a": (x := base())[:6], "b": x[6:]},
}


def untied(report):
    return [one for one in report.fallbacks if one.kind == "untied"]


@pytest.mark.parametrize("how", ["save", "async", "lazy"])
@pytest.mark.parametrize("kind", UNTIED)
def test_what_comes_back_apart_is_in_the_report(tmp_path, kind, how):
    state = UNTIED[kind]()
    with penstock.CheckpointStore(tmp_path) as store:
        if how == "save":
            report = store.save(1, state)
        else:
            report = store.save_async(1, state, lazy=how == "lazy").result()
        loaded = store.load()
    (reason,) = untied(report)
    assert " and b have elements in common" in reason or "b and c have" in reason
    assert all(np.array_equal(loaded[name], state[name]) for name in state)
    assert not np.shares_memory(np.asarray(loaded["a"]), np.asarray(loaded["b"]))


@pytest.mark.parametrize("kind", [*TIED, *APART])
def test_what_is_tied_or_shares_nothing_is_not(tmp_path, kind):
    state = {**TIED, **APART}[kind]()
    assert not untied(penstock.save(tmp_path / "ckpt", state))
    loaded = penstock.load(tmp_path / "ckpt")
    for name in state:
        assert torch.equal(loaded[name], state[name])
    names = list(state)
    is_tied = np.shares_memory(loaded[names[0]].numpy(), loaded[names[1]].numpy())
    assert is_tied == (kind in TIED)
