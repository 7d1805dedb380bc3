"""The merged report of a load of two reads, and NumPy's types of equal size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import penstock
from penstock.checkpoint.loading.fetch import merged


def read(bytes_read, *, is_direct):
    sums = dict.fromkeys(
        ("bytes", "bounced_bytes", "device_bytes", "opened_bytes", "tensors", "files", "seconds"), 1
    )
    return {
        **sums, "bytes_read": bytes_read, "phases": {}, "fallbacks": [], "direct_io": is_direct,
        "staging_peak_bytes": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (read(9, is_direct=True), read(9, is_direct=True), True),
        (read(9, is_direct=True), read(9, is_direct=False), False),
        (read(9, is_direct=False), read(9, is_direct=True), False),
        # One of the two read no file.
        (read(9, is_direct=True), read(0, is_direct=False), True),
        (read(0, is_direct=False), read(9, is_direct=True), True),
        (read(0, is_direct=False), read(0, is_direct=False), False),
    ],
)
def test_two_reads_went_past_the_page_cache_if_both_did(one, other, expected):
    assert merged([one, other])["direct_io"] is expected


TYPES = [np.dtype(char) for char in "bBhHiIlLqQefdgFDG"]


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.char)
@pytest.mark.parametrize("order", ["=", "S"])
def test_every_numeric_type_of_numpy_comes_back_as_itself(tmp_path, dtype, order):
    """Also C types of equal size: `longlong` beside `int64` on Linux."""
    dtype = dtype.newbyteorder(order)
    array = np.arange(6).astype(dtype).reshape(2, 3)
    state = {"array": array, "view": array[:, 1:], "dtype": dtype, "empty": np.empty(0, dtype)}
    state["zero"] = np.empty((), dtype)
    if order == "=":
        state["scalar"] = dtype.type(3)
    penstock.save(tmp_path / "ckpt", state)
    found = penstock.load(tmp_path / "ckpt")
    for name in ("array", "view", "empty", "zero"):
        assert found[name].dtype.char == dtype.char
        assert found[name].dtype.str == dtype.str
        np.testing.assert_array_equal(found[name], state[name])
    assert found["dtype"].char == dtype.char
    assert found["dtype"] == dtype
    assert np.shares_memory(found["array"], found["view"])
    if order == "=":
        assert type(found["scalar"]) is dtype.type
    target = {**state, "array": np.zeros((2, 3), dtype)}
    target["view"] = target["array"][:, 1:]
    penstock.load(tmp_path / "ckpt", into=target)
    np.testing.assert_array_equal(target["array"], array)


def test_one_memory_under_two_types_stays_one(tmp_path):
    array = np.arange(4, dtype=np.int64)
    penstock.save(tmp_path / "ckpt", {"a": array, "b": array.view(np.longlong)})
    found = penstock.load(tmp_path / "ckpt")
    assert [found[name].dtype.char for name in "ab"] == ["l", "q"]
    assert all(np.shares_memory(*pair) for pair in itertools.combinations(found.values(), 2))
