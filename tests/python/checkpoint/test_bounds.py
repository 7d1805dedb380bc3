"""A file of kilobytes costs neither minutes nor gigabytes, whatever it claims.

No clock is read: quadratic work is refused by a count, and memory is bounded by the system's limit.
"""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import penstock
from conftest import run_child
from forge import Forgery
from penstock import _native
from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.tree.scalars import COLLIDING_MAX
from penstock.cli import cli
from penstock.errors import CorruptCheckpointError, StateMismatchError, UnsupportedStateError

MODULUS = 2**61 - 1
"""Python hashes an integer as its remainder modulo this prime."""

MANY = 30_000

CONTAINERS = {
    "dict": lambda keys: {"$": "dict", "v": [[key, 0] for key in keys]},
    "odict": lambda keys: {"$": "odict", "v": [[key, 0] for key in keys]},
    "counter": lambda keys: {"$": "counter", "v": [[key, 0] for key in keys]},
    "defaultdict": lambda keys: {
        "$": "defaultdict", "factory": "none", "v": [[key, 0] for key in keys]
    },
    "set": lambda keys: {"$": "set", "v": keys},
    "frozenset": lambda keys: {"$": "frozenset", "v": keys},
}  # fmt: skip


def integers(count):
    return [{"$": "int", "v": hex(index * MODULUS)} for index in range(count)]


def tuples(count):
    return [{"$": "tuple", "v": ["a", key]} for key in integers(count)]


@pytest.fixture
def small(tmp_path):
    penstock.save(tmp_path / "small", {"w": torch.arange(6.0)})
    return tmp_path / "small"


@pytest.mark.parametrize("keys", [integers, tuples])
@pytest.mark.parametrize("container", CONTAINERS)
def test_keys_of_one_hash_are_refused_before_they_are_compared(small, container, keys):
    node = CONTAINERS[container](keys(MANY))
    Forgery(small).write_tree(json.dumps({"x": node}))
    calls = [
        lambda: penstock.load(small),
        lambda: penstock.load(small, keys="x*"),
        lambda: penstock.inspect(small).values(),
    ]
    if "set" not in container:
        calls.append(lambda: penstock.load(small, into={"x": {}}))
    for call in calls:
        with pytest.raises(CorruptCheckpointError, match=r"30000 .* have the same hash"):
            call()


@pytest.mark.parametrize("container", CONTAINERS)
def test_so_many_of_one_hash_as_are_saved_are_loaded(small, container):
    node = CONTAINERS[container](integers(COLLIDING_MAX))
    Forgery(small).write_tree(json.dumps({"x": node}))
    state = penstock.load(small)
    assert len(state["x"]) == COLLIDING_MAX
    penstock.save(small, state, overwrite=True)
    assert penstock.load(small) == state


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys])
def test_what_would_not_load_is_not_saved(tmp_path, kind):
    keys = [index * MODULUS for index in range(COLLIDING_MAX + 1)]
    with pytest.raises(UnsupportedStateError, match=r"x: 257 .* save a list") as raised:
        penstock.save(tmp_path / "ckpt", {"x": kind(keys)})
    assert raised.value.key == "x"
    assert not (tmp_path / "ckpt").exists()


def test_many_keys_of_any_other_kind_are_as_ever(tmp_path):
    keys = [
        *range(5000),
        *(index / 7 for index in range(5000)),
        *((index, "a") for index in range(5000)),
    ]
    state = {"keys": dict.fromkeys(keys, 0), "set": set(keys)}
    penstock.save(tmp_path / "ckpt", state)
    assert penstock.load(tmp_path / "ckpt") == state


def test_windows_of_one_hash_are_told_apart_in_linear_time(small):
    """Their values are hashed as text, so collisions cannot be constructed."""
    forgery = Forgery(small)
    count = 4096
    # Along a dimension of one element the stride is meaningless, and may be any number.
    strides = [[(index >> 2 * digit) % 4 * MODULUS for digit in range(6)] for index in range(count)]
    assert len({hash(tuple(one)) for one in strides}) == 1
    forgery.part["aliases"] = [
        {
            "name": f"a{index}",
            "tensor": 0,
            "view": {"shape": [1] * 6, "strides": one, "offset": 0},
        }
        for index, one in enumerate(strides)
    ]
    tree = {"w": {"$": "tensor", "i": 0}}
    tree |= {"a": [{"$": "ndarray", "a": index} for index in range(count)]}
    forgery.write_tree(json.dumps(tree))
    compared = 0

    class Counted(int):
        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    checkpoint = _native.open(str(small))
    aliases = [
        (name, index, (shape, tuple(map(Counted, strides)), offset))
        for name, index, (shape, strides, offset) in checkpoint.aliases()
    ]
    builder = Builder(checkpoint.tensors(), aliases, {0: (np.zeros(24, np.uint8), 0)})
    for index in range(count):
        try:
            builder.leaf({"$": "ndarray", "a": index})
        except ValueError:
            # NumPy has no such strides; they are compared nonetheless.
            continue
    assert compared < 100 * count


# Windows.


def expanded(path, value, shape, kind="tensor"):
    """A checkpoint of six elements and a window of terabytes over the first one."""
    penstock.save(path, {"w": torch.full((6,), value), "x": torch.zeros(1)})
    forgery = Forgery(path)
    view = {"shape": shape, "strides": [0] * len(shape), "offset": 0}
    forgery.part["aliases"] = [{"name": "v", "tensor": 0, "view": view}]
    forgery.write_tree(
        f'{{"w":{{"$":"tensor","i":0}},"x":{{"$":"tensor","i":1}},"v":{{"$":"{kind}","a":0}}}}'
    )
    return str(path)


def diffs(*pairs):
    """Compares in a process that may use 4 GiB beyond its memory at the start."""
    return run_child(
        """
        import json, resource, sys
        from click.testing import CliRunner
        import torch, penstock
        from penstock.cli import cli

        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
        said = []
        for pair in json.loads(sys.argv[1]):
            done = CliRunner().invoke(cli, ["diff", "--json", *pair], standalone_mode=False)
            error = done.exception
            said.append(json.loads(done.output) if error is None else
                        f"{type(error).__name__}: {error}")
        print(json.dumps(said))
        """,
        json.dumps(pairs),
    )


def overlapping(path, value):
    """A checkpoint with a window of terabytes that repeats elements along no dimension."""
    penstock.save(path, {"w": torch.full((1 << 20,), value)})
    forgery = Forgery(path)
    view = {"shape": [1 << 19, 1 << 19], "strides": [1, 1], "offset": 0}
    forgery.part["aliases"] = [{"name": "v", "tensor": 0, "view": view}]
    forgery.write_tree('{"w":{"$":"tensor","i":0},"v":{"$":"tensor","a":0}}')
    return str(path)


def test_windows_of_terabytes_are_compared_in_little_memory_or_refused_by_name(tmp_path):
    pairs, counts = [], []
    for kind in ("tensor", "ndarray"):
        for number, shape in enumerate(([1 << 40], [1 << 20, 3, 1 << 18])):
            names = (f"{kind}-{number}-a", 1.0), (f"{kind}-{number}-b", 3.0)
            pairs.append([expanded(tmp_path / name, v, shape, kind) for name, v in names])
            counts.append(math.prod(shape))
    same = [pairs[0][0], pairs[0][0]]
    apart = [overlapping(tmp_path / "over-a", 1.0), overlapping(tmp_path / "over-b", 2.0)]
    *compared, same, refused = diffs(*pairs, same, apart)
    for result, count in zip(compared, counts, strict=True):
        found = {row.pop("name"): row for row in result["tensors"]}
        assert found["v"] == {"elements": count, "differing": count, "max_abs_difference": 2.0}
        assert found["w"]["differing"] == 6
    assert same["same"]
    assert refused.startswith("StateMismatchError: ")
    assert "v cannot be compared" in refused


def test_windows_as_people_have_them_are_compared(tmp_path):
    for name, value in (("a", 0.0), ("b", 5.0)):
        base = torch.arange(100_000.0).view(100, 1000)
        base[3, 5] += value
        state = {"base": base, "unfolded": base.unfold(1, 8, 1), "turned": base.T}
        state |= {"wide": base[:1].expand(7, 1000), "int": base.to(torch.int8).T}
        penstock.save(tmp_path / name, state)
    result = CliRunner().invoke(
        cli, ["diff", "--json", str(tmp_path / "a"), str(tmp_path / "b")], standalone_mode=False
    )
    found = {row["name"]: row["differing"] for row in json.loads(result.output)["tensors"]}
    assert found == {"base": 1, "unfolded": 6, "turned": 1, "int": 1}


@pytest.mark.parametrize("kind", ["tensor", "ndarray"])
def test_a_window_of_terabytes_is_loaded_as_a_window(tmp_path, kind):
    path = expanded(tmp_path / "a", 1.0, [1 << 40], kind)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm").read_text().split()[0]
    bound = int(pages) * resource.getpagesize() + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        state = penstock.load(path)
        assert state["v"].shape == (1 << 40,)
        assert float(state["v"][-1]) == 1.0
        with pytest.raises(StateMismatchError, match="shape"):
            penstock.load(
                path, into={"w": torch.zeros(6), "x": torch.zeros(1), "v": torch.zeros(6)}
            )
        penstock.inspect(path).values()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
