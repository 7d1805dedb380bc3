"""Families of nested states that nobody would write down by hand."""

from __future__ import annotations

import copy
import fnmatch
import tempfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

import penstock
from compare import assert_same, tensor_bytes
from conftest import need_uring
from states import states

ENGINES = {
    "uring-direct": penstock.Options(engine="uring", direct="on"),
    "threads-buffered": penstock.Options(engine="threads", direct="off"),
}

# A failure prints its seed and the smallest state that fails.
FAMILY = settings(
    max_examples=200,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(params=list(ENGINES), ids=list(ENGINES))
def engine(request):
    if request.param.startswith("uring"):
        need_uring()
    return ENGINES[request.param]


def fresh(disk_path: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=disk_path)) / "ckpt"


@FAMILY
@given(state=states())
def test_a_state_comes_back_bit_for_bit(disk_path, engine, state):
    path = fresh(disk_path)
    report = penstock.save(path, state, options=engine)
    assert_same(penstock.load(path, options=engine), state)
    if report.tensor_bytes:
        assert report.engine == engine.engine
        assert report.direct_io == (engine.direct == "on")


@FAMILY
@given(state=states())
def test_a_saved_state_verifies(disk_path, state):
    path = fresh(disk_path)
    report = penstock.save(path, state)
    result = penstock.verify(path)
    assert result.ok, result.problems
    assert result.bytes_checked == report.bytes
    assert sum(file.stat().st_size for file in path.iterdir()) == report.bytes


@FAMILY
@given(state=states())
def test_saving_what_was_loaded_gives_the_same_data(disk_path, state):
    first, second = fresh(disk_path), fresh(disk_path)
    one = penstock.save(first, state)
    other = penstock.save(second, penstock.load(first))
    assert (one.tensors, one.tensor_bytes) == (other.tensors, other.tensor_bytes)


# Selections.


def leaf_names(value, prefix="", level=0):
    """Dotted names of all leaves, as the format names them (6.4)."""
    items = children(value)
    if not items:
        yield prefix[:-1] if level else "value"
        return
    for key, child in items:
        yield from leaf_names(child, f"{prefix}{key}.", level + 1)


def children(value):
    if isinstance(value, dict):
        return list(value.items())
    if type(value) in (list, tuple):
        return list(enumerate(value))
    return []


GONE = object()


def prune(value, wanted, prefix="", level=0):
    """The state without the leaves that are not wanted; emptied containers go, too."""
    items = children(value)
    if not items:
        return value if wanted(prefix[:-1] if level else "value") else GONE
    kept = [(key, prune(child, wanted, f"{prefix}{key}.", level + 1)) for key, child in items]
    kept = [(key, child) for key, child in kept if child is not GONE]
    if not kept:
        return GONE
    if type(value) in (list, tuple):
        return type(value)(child for _, child in kept)
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, kept)
    pruned = type(value)(dict(kept)) if type(value) is Counter else type(value)(kept)
    if type(value) is OrderedDict:
        vars(pruned).update(vars(value))
    return pruned


@FAMILY
@given(state=states(), data=st.data())
def test_a_selection_equals_the_pruned_state(disk_path, engine, state, data):
    names = list(leaf_names(state))
    patterns = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from(names),
                st.sampled_from(names).map(lambda name: f"{name[: len(name) // 2]}*"),
                st.just("*"),
            ),
            min_size=1,
            max_size=3,
        )
    )

    def matches(name, pattern):
        return name == pattern or fnmatch.fnmatchcase(name, pattern)

    # Half of a name with a bracket in it may be a pattern that matches nothing.
    assume(all(any(matches(name, pattern) for name in names) for pattern in patterns))
    path = fresh(disk_path)
    penstock.save(path, state, options=engine)
    loaded = penstock.load(path, keys=patterns, options=engine)
    expected = prune(state, lambda name: any(matches(name, pattern) for pattern in patterns))
    note(f"patterns {patterns!r}")
    assert_same(loaded, expected)


# Filling existing memory.


def fillable(value):
    """Whether a target of this structure can be written: no expanded or read-only memory."""
    if isinstance(value, dict | list | tuple) and type(value) is not torch.Size:
        return all(fillable(child) for _, child in children(value))
    if isinstance(value, np.ndarray):
        return value.flags.writeable
    if isinstance(value, torch.Tensor):
        dims = zip(value.shape, value.stride(), strict=True)
        return not any(stride == 0 and dim > 1 for dim, stride in dims)
    return True


def has_nan_key(value):
    """Whether a dictionary key is NaN or holds one."""
    keys = value if isinstance(value, dict) else []
    return any("nan" in repr(key) for key in keys) or any(
        has_nan_key(child) for _, child in children(value)
    )


def scramble(value):
    """Overwrites every tensor and array with other bytes."""
    if isinstance(value, dict | list | tuple) and type(value) is not torch.Size:
        for _, child in children(value):
            scramble(child)
    elif isinstance(value, np.ndarray):
        value[...] = np.zeros(1, value.dtype)[0]
    elif isinstance(value, torch.Tensor) and value.numel():
        raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        raw.fill_(0)


@FAMILY
@given(state=states())
def test_filling_a_target_equals_a_fresh_load(disk_path, engine, state):
    # A NaN equals nothing, so a target's NaN key is no key of the checkpoint.
    assume(fillable(state) and not has_nan_key(state))
    target = copy.deepcopy(state)
    path = fresh(disk_path)
    penstock.save(path, state, options=engine)
    scramble(target)
    before = [id(leaf) for leaf in flat(target)]
    filled = penstock.load(path, into=target, options=engine)
    expected = penstock.load(path, options=engine)
    assert [id(leaf) for leaf in flat(filled)] == before
    for one, other in zip(flat(filled), flat(expected), strict=True):
        assert tensor_bytes(one) == tensor_bytes(other)
    if type(state) in (list, dict, OrderedDict):
        assert filled is target


def flat(value):
    """All tensors and arrays of a state, in order."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    for _, child in children(value):
        yield from flat(child)
