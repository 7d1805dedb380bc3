"""One rank's view of a checkpoint of many: its own tree, and others' members where unambiguous."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
import torch

import penstock
from compare import assert_same
from forge import Forgery
from penstock import _native
from penstock.checkpoint.view.view import view
from penstock.errors import CorruptCheckpointError, StateMismatchError

OPTIONS = penstock.Options().to_native()


def number_of(name):
    return float(sum(map(ord, name)))


def shared(name, shape=(3,)):
    """Returns a leaf for a tensor that ranks share."""
    return {"$": "tensor", "g": name, "dtype": "float32", "shape": list(shape)}


def whole(name, shape=(3,)):
    """Returns the tensor that `shared` is loaded as."""
    return torch.full(shape, number_of(name))


OWN = {"$": "tensor", "i": 0}


def commit(path, ranks):
    """Commits a checkpoint of ranks, each given as its tree and the names of its whole tensors.

    Each rank also stores a tensor of its own, which `OWN` refers to.
    """
    attempt = _native.Attempt.begin(str(path), overwrite=False)
    votes = []
    for rank, (node, names) in enumerate(ranks):
        joined = attempt if rank == 0 else _native.Attempt.join(str(path), attempt.id)
        own = np.full(2, rank, np.float32)
        tensors = [("own", "float32", (2,), own.ctypes.data, None, 4, own, None, None)]
        for name in names:
            data = np.full(3, number_of(name), np.float32)
            place = (data.ctypes.data, None, 4, data)
            tensors.append((f"{name}.", "float32", (3,), *place, (name, (3,), (0,)), None))
        text = node if isinstance(node, str) else json.dumps(node, separators=(",", ":"))
        job = _native.Job(
            str(path), tensors, [], text, options=OPTIONS, arena=None, lazy=True, nice=None
        )
        votes.append((rank, *job.write(joined, rank)["vote"]))
        if rank:
            joined.abandon()
    attempt.commit(votes, step=None, metadata="{}", overwrite=False)
    attempt.abandon()
    return path


def stage(first, **more):
    """Returns the state of a pipeline stage with two layers, and the names of its tensors."""
    names = [f"layer{first}", f"layer{first + 1}"]
    return {"model": {name: shared(name) for name in names}, **more}, names


@pytest.fixture
def stages(tmp_path):
    """Commits two stages with different layer names, each with values of its own."""
    one, its_names = stage(0, stage=0, own=OWN)
    other, their_names = stage(2, stage=1, own=OWN, sampler=OWN, note={"text": "x"})
    return commit(tmp_path / "ckpt", [(one, its_names), (other, their_names)])


LAYERS = {f"layer{n}": whole(f"layer{n}") for n in range(4)}


def test_layers_of_other_stages_have_their_place(stages):
    expected = {"model": LAYERS, "stage": 0, "own": torch.zeros(2)}
    assert_same(penstock.load(stages), expected)
    assert [tensor.rank for tensor in penstock.inspect(stages).tensors] == [None] * 4 + [0, 1]


def test_values_of_other_ranks_stay_theirs(stages):
    state = penstock.load(stages)
    assert "sampler" not in state
    assert "note" not in state
    with pytest.raises(StateMismatchError, match="sampler"):
        penstock.load(stages, keys="sampler")


def test_a_rank_that_is_asked_for_is_as_it_was_saved(stages):
    for rank in range(4):
        state = penstock.load(stages, rank=rank)
        assert list(state["model"]) == [f"layer{2 * (rank % 2) + n}" for n in range(2)]
        assert state["stage"] == rank % 2
        assert_same(state["own"], torch.full((2,), float(rank % 2)))
    assert state["note"] == {"text": "x"}


def test_only_what_a_target_holds_is_added(stages):
    into = {"model": {"layer3": torch.zeros(3), "layer0": torch.zeros(3), "layer1": torch.zeros(3)}}
    penstock.load(stages, into=into, keys="model.*")
    assert_same(into["model"]["layer3"], LAYERS["layer3"])


def test_of_a_subtree_that_is_added_only_what_a_target_holds(tmp_path):
    inner = {"a": shared("x.a"), "b": shared("x.b"), "lr": 0.5, "n": 3}
    pairs = {"$": "dict", "v": [[7, shared("x.7")], [8, shared("x.8")]]}
    other = {"x": {**inner, "m": pairs}}
    names = ["x.a", "x.b", "x.7", "x.8"]
    path = commit(tmp_path / "ckpt", [({"w": shared("w")}, ["w"]), (other, names)])
    into = {"w": torch.zeros(3), "x": {"b": torch.zeros(3), "lr": 0.0, "m": {8: torch.zeros(3)}}}
    penstock.load(path, into=into)
    expected = {"b": whole("x.b"), "lr": 0.5, "m": {8: whole("x.8")}}
    assert_same(into, {"w": whole("w"), "x": expected})


def test_what_other_ranks_call_the_same_is_not_mixed(tmp_path):
    """Both stages count their layers from 0: the third layer of one is not the other's."""
    names = [f"{n}@{rank}" for rank in range(2) for n in range(2 + rank)]
    trees = [
        {"layers": {str(n): shared(f"{n}@{rank}") for n in range(2 + rank)}} for rank in (0, 1)
    ]
    path = commit(tmp_path / "ckpt", [(trees[0], names[:2]), (trees[1], names[2:])])
    with pytest.raises(StateMismatchError, match="'0@1', '1@1', '2@1'") as caught:
        penstock.load(path)
    assert "rank=" in str(caught.value)
    assert "keys=" in str(caught.value)
    into = {"layers": {str(n): torch.zeros(3) for n in range(3)}}
    with pytest.raises(StateMismatchError, match=r"layers\.2: is in the target"):
        penstock.load(path, into=into)
    assert_same(
        penstock.load(path, keys="layers.*"), {"layers": {"0": whole("0@0"), "1": whole("1@0")}}
    )
    for rank in range(2):
        expected = {str(n): whole(f"{n}@{rank}") for n in range(2 + rank)}
        assert_same(penstock.load(path, rank=rank), {"layers": expected})
    found = [(tensor.name, tensor.rank) for tensor in penstock.inspect(path).tensors]
    assert [*found[:2], *sorted(found[2:5])] == [
        *[("layers.0", None), ("layers.1", None)],
        *[("0@1", 1), ("1@1", 1), ("2@1", 1)],
    ]


@pytest.mark.parametrize("kind", [int, str])
def test_nor_is_what_they_count_alike(tmp_path, kind):
    """The third parameter's state in another stage's optimizer is not this one's."""
    trees, names = [], []
    for rank in (0, 1):
        counted = [[kind(n), {"m": shared(f"{n}.m@{rank}")}] for n in range(2 + rank)]
        trees.append({"opt": {"$": "dict", "v": counted}, f"w{rank}": shared(f"w{rank}")})
        names.append([*(f"{n}.m@{rank}" for n in range(2 + rank)), f"w{rank}"])
    path = commit(tmp_path / "ckpt", list(zip(trees, names, strict=True)))
    expected = {kind(n): {"m": whole(f"{n}.m@0")} for n in range(2)}
    assert_same(penstock.load(path, keys="opt.*"), {"opt": expected})
    into = {"opt": {kind(n): {"m": torch.zeros(3)} for n in range(3)}}
    into |= {f"w{rank}": torch.zeros(3) for rank in (0, 1)}
    with pytest.raises(StateMismatchError, match=r"opt\.2"):
        penstock.load(path, into=into)


def test_nor_is_anything_below(tmp_path):
    """Members deeper inside two dictionaries of one kind are not merged either."""
    trees = [
        {"opt": {"w": shared(f"w@{rank}"), "state": {f"s{rank}": shared(f"s{rank}")}}}
        for rank in range(2)
    ]
    path = commit(tmp_path / "ckpt", [(trees[0], ["w@0", "s0"]), (trees[1], ["w@1", "s1"])])
    assert_same(penstock.load(path, keys="opt.state.*"), {"opt": {"state": {"s0": whole("s0")}}})
    with pytest.raises(StateMismatchError, match="'w@1', 's1'"):
        penstock.load(path)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({}, {7: 0, "$": 0, "b": 0}),
        ({"a": None}, {"a": None, 7: 0, "$": 0, "b": 0}),
        ({"$": "odict", "v": []}, OrderedDict({7: 0, "$": 0, "b": 0})),
    ],
)
def test_members_of_any_key_find_a_place(tmp_path, kind, expected):
    """A JSON object has no place for the keys 7 and "$"."""
    pairs = [[7, shared("x.7")], ["$", shared("x.$")], ["b", shared("x.b")]]
    other = {"x": {"$": "dict", "v": pairs}}
    path = commit(tmp_path / "ckpt", [({"x": kind, "y": 1}, []), (other, ["x.7", "x.$", "x.b"])])
    values = {7: whole("x.7"), "$": whole("x.$"), "b": whole("x.b")}
    expected = type(expected)((key, values.get(key)) for key in expected)
    assert_same(penstock.load(path), {"x": expected, "y": 1})


def test_a_rank_without_a_state_sees_the_first_ones(stages, tmp_path):
    """As after a save by DCP, which has one tree."""
    path = commit(tmp_path / "other", [({"w": shared("w"), "step": 3}, []), ({}, ["w"])])
    seen = view(_native.open(str(path)), 1)
    assert seen.node["step"] == 3
    assert penstock.load(path, rank=1) == {}


# Unparsed trees: a rank of thousands cannot parse the trees of all others.


TWICE = '{"w":1,"w":2}'
"""A tree that `tree.parse` refuses."""


def test_no_tree_is_parsed_where_the_own_names_all(tmp_path):
    ranks = [({"w": shared("w")}, []), (TWICE, ["w"]), (TWICE, [])]
    path = commit(tmp_path / "ckpt", ranks)
    assert_same(penstock.load(path), {"w": whole("w")})


def test_those_are_parsed_that_store_what_is_not_seen(tmp_path):
    ranks = [
        *[({"a": shared("a")}, ["a"]), (TWICE, [])],
        *[({"a": shared("a"), "b": shared("b"), "c": shared("c")}, ["b"]), (TWICE, ["c"])],
    ]
    path = commit(tmp_path / "ckpt", ranks)
    assert_same(penstock.load(path), {name: whole(name) for name in "abc"})


def test_then_those_that_may_name_it(tmp_path):
    ranks = [({"a": shared("a")}, ["a"]), ({"b": shared("b")}, []), ({}, ["b"]), (TWICE, [])]
    path = commit(tmp_path / "ckpt", ranks)
    assert_same(penstock.load(path), {name: whole(name) for name in "ab"})


def test_none_is_parsed_that_a_target_has_no_use_for(tmp_path):
    path = commit(tmp_path / "ckpt", [({"a": shared("a")}, ["a"]), (TWICE, ["b"])])
    into = {"a": torch.zeros(3)}
    penstock.load(path, into=into)
    assert_same(into, {"a": whole("a")})
    assert_same(penstock.load(path, rank=0), into)
    with pytest.raises(CorruptCheckpointError, match="repeats a key"):
        penstock.load(path)


# One rank.


def test_a_shared_tensor_without_elements_of_one_rank(tmp_path):
    """It has no boxes, so only the tree shows that the checkpoint is one of ranks."""
    path = tmp_path / "ckpt"
    penstock.save(path, {"w": torch.ones(3)})
    forgery = Forgery(path)
    forgery.write_tree(
        json.dumps({"w": OWN, "e": shared("e", (0, 4)), "again": shared("e", (0, 4))})
    )
    state = penstock.load(path)
    assert_same(state, {"w": torch.ones(3), "e": torch.empty(0, 4), "again": torch.empty(0, 4)})
    assert [tensor.name for tensor in penstock.inspect(path).tensors] == ["e", "w"]


@pytest.mark.parametrize("key", ['"g"', '"\\u0067"'])
def test_a_shared_tensor_that_nobody_stored_is_damage(tmp_path, key):
    path = tmp_path / "ckpt"
    penstock.save(path, {"w": torch.ones(3)})
    leaf = json.dumps(shared("e")).replace('"g"', key)
    Forgery(path).write_tree(f'{{"w":{json.dumps(OWN)},"e":{leaf}}}')
    with pytest.raises(CorruptCheckpointError, match="tree makes no sense"):
        penstock.load(path)


def test_a_key_of_that_name_is_only_a_key(tmp_path):
    path = tmp_path / "ckpt"
    penstock.save(path, {"g": torch.ones(3), "inner": {"g": "g"}})
    assert_same(penstock.load(path), {"g": torch.ones(3), "inner": {"g": "g"}})
    assert not view(_native.open(str(path)), 0).is_shared


AS_FIRST = '{"$":"first"}'


def test_a_state_may_be_that_of_the_first_rank(tmp_path):
    first = {"w": shared("w"), "own": OWN}
    path = commit(tmp_path / "ckpt", [(first, ["w"]), (AS_FIRST, []), ({}, [])])
    expected = {"w": whole("w"), "own": torch.zeros(2)}
    for rank in (None, 0, 1, 4):
        assert_same(penstock.load(path, rank=rank), expected)
    assert penstock.load(path, rank=2) == {}


def test_the_first_rank_has_no_state_of_another(tmp_path):
    path = commit(tmp_path / "ckpt", [(AS_FIRST, []), ({"own": OWN}, [])])
    with pytest.raises(CorruptCheckpointError, match="first"):
        penstock.load(path)
