"""The comparison that judges every round trip finds each kind of difference."""

from __future__ import annotations

import copy
import struct
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from compare import assert_same

NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]


def with_metadata(value):
    state = OrderedDict(w=1)
    state._metadata = value
    return state


DIFFERENT = {
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "zeros": (0.0, -0.0),
    "payloads": (NAN, float("nan")),
    "payloads in a key": ({NAN: 1}, {float("nan"): 1}),
    "list and tuple": ([1], (1,)),
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "keys 1 and True": ({1: 0}, {True: 0}),
    "dict and ordered": ({}, OrderedDict()),
    "factories": (defaultdict(list), defaultdict(int)),
    "metadata": (with_metadata(1), with_metadata(2)),
    "no metadata": (OrderedDict(w=1), with_metadata(1)),
    "bytes and bytearray": (b"a", bytearray(b"a")),
    "numpy and python": (np.float64(1), 1.0),
    "sets": ({1, 2}, {1, True + 2}),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "shape": (torch.zeros(2, 1), torch.zeros(2)),
    "elements": (torch.zeros(2), torch.tensor([0.0, -0.0])),
    "tensor and array": (torch.zeros(2), np.zeros(2, np.float32)),
    "byte order": (np.zeros(2, "<f4"), np.zeros(2, ">f4")),
    "size and tuple": (torch.Size([1]), (1,)),
}


@pytest.mark.parametrize("pair", list(DIFFERENT.values()), ids=list(DIFFERENT))
def test_different_states_are_told_apart(pair):
    for one, other in (pair, pair[::-1]):
        assert_same(copy.deepcopy(one), one)
        with pytest.raises(AssertionError):
            assert_same(one, other)


def tied():
    base = torch.arange(6.0)
    return [base, base, base[2:4]]


def test_a_copy_with_its_ties_is_the_same():
    state = tied()
    assert_same(copy.deepcopy(state), state)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_tie_that_was_cut_is_noticed(index):
    state = tied()
    actual = copy.deepcopy(state)
    actual[index] = actual[index].clone()
    with pytest.raises(AssertionError):
        assert_same(actual, state)


def test_a_tie_that_was_made_up_is_noticed():
    state = [torch.zeros(4), torch.zeros(4), torch.zeros(2)]
    shared = torch.zeros(4)
    for actual in ([shared, shared, torch.zeros(2)], [shared, torch.zeros(4), shared[1:3]]):
        with pytest.raises(AssertionError):
            assert_same(actual, state)


def test_a_view_at_another_place_is_noticed():
    base = torch.zeros(6)
    with pytest.raises(AssertionError):
        assert_same([base, base[1:3]], [base, base[2:4]])
