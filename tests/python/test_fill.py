"""Boxes of tensors that are read into memory: never past its end, whatever the file says."""

from __future__ import annotations

import numpy as np
import pytest

import penstock
from penstock import _native

OPTIONS = penstock.Options().to_native()
UNTOUCHED = 0xEE


def fill(path, shape, item_bytes, strides=None):
    """Asks for the first box of the only tensor; what came into the memory."""
    memory = np.full(4096, UNTOUCHED, np.uint8)
    place = (memory.ctypes.data, strides, item_bytes, memory)
    request = (0, (0,) * len(shape), shape, *place)
    _native.open(str(path)).fill([request], options=OPTIONS, progress=None)
    return memory


@pytest.fixture
def path(tmp_path):
    penstock.save(tmp_path / "ckpt", {"w": np.arange(200, dtype=np.float32).reshape(10, 20)})
    return tmp_path / "ckpt"


def test_only_what_was_asked_for_is_written(path):
    memory = fill(path, (2, 20), 4)
    assert np.array_equal(memory[:160].view(np.float32), np.arange(40, dtype=np.float32))
    assert (memory[160:] == UNTOUCHED).all()


@pytest.mark.parametrize("item_bytes", [1, 2, 8])
def test_items_of_another_size_than_the_memorys_are_refused(path, item_bytes):
    """The size of the file's items would reach past the end of memory for smaller ones."""
    with pytest.raises(penstock.StateMismatchError, match="items of 4 bytes are stored") as caught:
        fill(path, (10, 20), item_bytes)
    assert caught.value.key == "w"


@pytest.mark.parametrize(
    ("shape", "item_bytes"), [((1,), 0), ((1 << 62,), 4), ((1 << 40, 1 << 40), 4)]
)
def test_memory_of_no_possible_size_is_refused(path, shape, item_bytes):
    with pytest.raises(ValueError, match="no size of memory"):
        fill(path, shape, item_bytes)
