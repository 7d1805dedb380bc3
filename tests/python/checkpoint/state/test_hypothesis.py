"""Drawn families of nested states, beyond those written by hand."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

import penstock
from choices import choices
from compare import assert_same, tensor_bytes, tensors_in
from penstock.checkpoint.state.tree.names import EMPTY, labels, matcher
from penstock.errors import PenstockWarning, StateMismatchError
from states import states

# `make test-slow` draws more of them.
STATES = int(os.environ.get("PENSTOCK_TORTURE_FAMILIES", 60))
# A failure prints its seed and the smallest failing state.
FAMILY = settings(
    max_examples=STATES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# Fewer examples, as each takes several calls.
VERDICTS = settings(FAMILY, max_examples=STATES // 5)


def fresh(disk_path: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=disk_path)) / "ckpt"


@FAMILY
@given(state=states(), chosen=choices())
def test_a_state_comes_back_bit_for_bit(disk_path, state, chosen):
    path = fresh(disk_path)
    reports = []
    with chosen.made() as options:
        report = penstock.save(path, state, options=options)
        loaded = penstock.load(path, options=options, report=reports.append)
        asked = options or penstock.Options()
    assert_same(loaded, state)
    assert reports[0].verified == chosen.verifies
    if report.tensor_bytes:
        assert asked.engine in ("auto", report.engine)
        assert asked.direct == "auto" or report.direct_io == (asked.direct == "on")


@FAMILY
@given(state=states(), saving=choices(), chosen=choices())
def test_a_saved_state_verifies(disk_path, state, saving, chosen):
    path = fresh(disk_path)
    with saving.made() as options:
        report = penstock.save(path, state, options=options)
    with chosen.made() as options:
        result = penstock.verify(path, options=options)
    assert result.ok, result.problems
    assert result.bytes_checked == report.bytes
    assert sum(file.stat().st_size for file in path.iterdir()) == report.bytes


# Verdicts.


def flip(file: Path, at: int) -> None:
    """Flips a bit of a file, whose size stays the same."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@VERDICTS
@given(saving=choices(), chosen=choices(), data=st.data())
def test_no_choice_keeps_a_verdict_from_the_digests(disk_path, saving, chosen, data):
    root = fresh(disk_path)
    state = {"a": np.arange(3000), "b": np.ones(700, np.float32)}
    with saving.made() as options:
        store = penstock.CheckpointStore(root, options=options)
        store.save(1, state)
        store.save(2, state)
    info = data.draw(st.sampled_from(penstock.inspect(store.path(2)).tensors))
    flip(Path(store.path(2), info.file), data.draw(st.integers(info.begin, info.end - 1)))
    with chosen.made() as options, warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        store = penstock.CheckpointStore(root, keep_last=1, options=options)
        told = {step.step: step.state for step in store.scrub().steps}
        assert told == {1: "verified", 2: "damaged"}
        assert {step: mark.is_good for step, mark in store.marks().items()} == {1: True, 2: False}
        path = store.path(2)
        assert not penstock.verify(path, options=options).ok
        assert not store.verify(2).ok
        hit = penstock.explain(path, options=options).hit
        assert [fate.name for fate in hit] == [info.name]
        salvaged = penstock.salvage(path, root / "salvaged", options=options)
        assert [fate.name for fate in salvaged.missing] == [info.name]
        assert_same(store.load(fallback=True), state)
        # The newest step that is known to be good outlives every save.
        store.save(3, state)
        assert {1, 3} <= set(store.steps())
        assert [step for step, _ in store.quarantined()] == [2]


@FAMILY
@given(state=states())
def test_saving_what_was_loaded_gives_the_same_data(disk_path, state):
    first, second = fresh(disk_path), fresh(disk_path)
    one = penstock.save(first, state)
    other = penstock.save(second, penstock.load(first))
    assert (one.tensors, one.tensor_bytes) == (other.tensors, other.tensor_bytes)


# Selections.


def leaf_names(value, prefix="", level=0):
    """Yields the names of all leaves; `test_leaf_names.py` checks that they are one-to-one."""
    items = named_children(value)
    if not items:
        yield leaf_name(prefix, level)
        return
    for name, _, child in items:
        yield from leaf_names(child, f"{prefix}{name}.", level + 1)


def leaf_name(prefix, level):
    return (prefix[:-1] or EMPTY) if level else "value"


def named_children(value):
    """Returns each child of a container: its part of the name, its key, and its value."""
    items = children(value)
    keys = [key for key, _ in items]
    parts = labels(keys, lambda index: bool(children(items[index][1])))
    return [(part, key, child) for part, (key, child) in zip(parts, items, strict=True)]


def children(value):
    if isinstance(value, dict):
        return list(value.items())
    if type(value) in (list, tuple, deque):
        return list(enumerate(value))
    return []


GONE = object()


def prune(value, wanted, prefix="", level=0):
    """Removes unwanted leaves from a state, and containers that become empty."""
    items = named_children(value)
    if not items:
        return value if wanted(leaf_name(prefix, level)) else GONE
    kept = [
        (key, prune(child, wanted, f"{prefix}{name}.", level + 1)) for name, key, child in items
    ]
    kept = [(key, child) for key, child in kept if child is not GONE]
    if not kept:
        return GONE
    if type(value) is deque:
        return deque((child for _, child in kept), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(child for _, child in kept)
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, kept)
    pruned = type(value)(dict(kept)) if type(value) is Counter else type(value)(kept)
    if type(value) is OrderedDict:
        vars(pruned).update(vars(value))
    return pruned


@FAMILY
@given(state=states(), chosen=choices(), data=st.data())
def test_a_selection_equals_the_pruned_state(disk_path, state, chosen, data):
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

    matching = [matcher(pattern) for pattern in patterns]
    assert len(set(names)) == len(names)
    # A name cut in half may end inside an escape, which would then escape the asterisk.
    assume(all(any(map(matches, names)) for matches in matching))
    path = fresh(disk_path)
    with chosen.made() as options:
        penstock.save(path, state, options=options)
        loaded = penstock.load(path, keys=patterns, options=options)
    expected = prune(state, lambda name: any(matches(name) for matches in matching))
    note(f"patterns {patterns!r}")
    assert_same(loaded, expected)


# Filling existing memory.


def fillable(value):
    """Whether a target of this structure is writable: no expanded or read-only memory."""
    if isinstance(value, torch.Tensor) and (inner := tensors_in(value)):
        return all(map(fillable, inner.values()))
    if isinstance(value, dict | list | tuple | deque) and type(value) is not torch.Size:
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
    if isinstance(value, torch.Tensor) and (inner := tensors_in(value)):
        scramble(inner)
    elif isinstance(value, dict | list | tuple | deque) and type(value) is not torch.Size:
        for _, child in children(value):
            scramble(child)
    elif isinstance(value, np.ndarray):
        value[...] = np.zeros(1, value.dtype)[0]
    elif isinstance(value, torch.Tensor) and value.numel():
        raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        raw.fill_(0)


@FAMILY
@given(state=states(), chosen=choices())
def test_filling_a_target_equals_a_fresh_load(disk_path, state, chosen):
    # A NaN equals nothing, so a target's NaN key matches no key of the checkpoint.
    assume(fillable(state) and not has_nan_key(state))
    # PyTorch cannot deep-copy all tensors made of others.
    target = copy.deepcopy(state, {id(one): one.clone() for one in composites(state)})
    path = fresh(disk_path)
    before = list(flat(target))
    with chosen.made() as options:
        penstock.save(path, state, options=options)
        scramble(target)
        try:
            filled = penstock.load(path, into=target, options=options)
        except StateMismatchError as error:
            # Overlapping tensors that are no windows of a stored one are stored one by one.
            assume("shares memory with" not in str(error))
            raise
        expected = penstock.load(path, options=options)
    assert all(map(is_same_memory, flat(filled), before))
    for one, other in zip(flat(filled), flat(expected), strict=True):
        assert tensor_bytes(one) == tensor_bytes(other)
    if type(state) in (list, dict, OrderedDict):
        assert filled is target


def composites(value):
    """Yields all tensors of a state that are made of others."""
    if isinstance(value, torch.Tensor) and tensors_in(value):
        yield value
    for _, child in children(value):
        yield from composites(child)


def is_same_memory(one, other):
    """Whether both are one object or, for parts returned anew at each access, one memory."""
    return one is other or one.data_ptr() == other.data_ptr()


def flat(value):
    """Yields all tensors and arrays of a state, in order."""
    if isinstance(value, torch.Tensor) and (inner := tensors_in(value)):
        yield from inner.values()
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield value
    for _, child in children(value):
        yield from flat(child)
