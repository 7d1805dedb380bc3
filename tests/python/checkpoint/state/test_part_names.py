"""Names of the tensors inside composite ones, which `inspect` shows beside those of leaves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import penstock
from penstock import features
from penstock.errors import StateMismatchError


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


@pytest.fixture
def path(tmp_path):
    penstock.register_type(Pair)
    state = {
        "table": torch.zeros(2, 3),
        "s": torch.eye(3).to_sparse(),
        "m": {"pair": Pair(torch.ones(2, 2), torch.ones(4))},
    }
    penstock.save(tmp_path / "ckpt", state)
    return tmp_path / "ckpt"


@pytest.mark.parametrize(
    ("name", "owner"), [("s.values", "s"), ("s.ind*", "s"), ("m.pair.first", "m.pair")]
)
def test_a_load_that_is_asked_for_a_part_names_the_whole_and_the_way_to_the_part(path, name, owner):
    with pytest.raises(StateMismatchError, match="plain=True") as caught:
        penstock.load(path, keys=[name])
    assert f"part of '{owner}'" in str(caught.value)
    assert penstock.load(path, keys=[owner])
    assert penstock.load(path, keys=[name], plain=True)


def test_the_same_of_a_state_that_is_one_tensor(tmp_path):
    penstock.save(tmp_path / "a", torch.eye(3).to_sparse())
    with pytest.raises(StateMismatchError, match="part of 'value'"):
        penstock.load(tmp_path / "a", keys=["values"])
    assert penstock.load(tmp_path / "a", keys=["value"]).is_sparse


def test_a_name_that_is_nowhere_is_none_of_a_part(path):
    with pytest.raises(StateMismatchError, match=r"penstock\.inspect|did you mean"):
        penstock.load(path, keys=["s.nothing"])


def test_rows_of_every_tensor_that_inspect_shows_are_read(path):
    for one in penstock.inspect(path).tensors:
        with features.open(path, one.name) as table:
            assert table.gather([0]).shape == (1, *one.shape[1:])


def test_a_table_is_chosen_as_if_there_were_no_parts(path):
    with features.open(path) as table:
        assert table.source.key == "table"


@pytest.mark.parametrize(("name", "parts"), [("s", "'s.indices', 's.values'"), ("m", "m.pair")])
def test_a_name_with_tensors_inside_says_which(path, name, parts):
    with pytest.raises(StateMismatchError, match="name one that is in it") as caught:
        features.open(path, name)
    assert parts in str(caught.value)
