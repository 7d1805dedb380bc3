"""Arrays in pieces, and frozen states."""

import numpy as np
import pytest

import penstock
from penstock.checkpoint.layout import tiling
from penstock.tensors.marks import Boxes, Frozen


def in_pieces(array, rows):
    pieces = [((row, 0), array[row : row + rows]) for row in range(0, len(array), rows)]
    return Boxes(array.shape, array.dtype, pieces)


def test_an_array_in_pieces_comes_back_whole_and_keeps_its_ties(tmp_path):
    whole = np.arange(24.0).reshape(6, 4)
    boxes = in_pieces(whole, 2)
    state = {"w": boxes, "tied": boxes, "w~1": np.ones(3), "other": in_pieces(whole[:4], 1)}
    report = penstock.save(tmp_path / "ckpt", state)
    assert report.tensor_bytes == whole.nbytes + 3 * 8 + whole[:4].nbytes
    loaded = penstock.load(tmp_path / "ckpt")
    assert np.array_equal(loaded["w"], whole)
    assert np.shares_memory(loaded["w"], loaded["tied"])
    assert np.array_equal(loaded["other"], whole[:4])
    assert loaded["w~1"].tolist() == [1, 1, 1]
    assert penstock.verify(tmp_path / "ckpt").ok
    assert len({tensor.name for tensor in penstock.inspect(tmp_path / "ckpt").tensors}) == 3
    assert np.array_equal(penstock.load(tmp_path / "ckpt", keys="w")["w"], whole)
    target = np.zeros((6, 4))
    penstock.load(tmp_path / "ckpt", into={"w": target}, keys="w")
    assert np.array_equal(target, whole)


def test_the_pieces_of_one_process_are_compared_once(tmp_path, monkeypatch):
    compared = []

    def check_tiled(shape, blocks, *, is_whole):
        compared.append((shape, is_whole))

    monkeypatch.setattr(tiling, "check_tiled", check_tiled)
    penstock.save(tmp_path / "ckpt", {"w": in_pieces(np.arange(24.0).reshape(6, 4), 2)})
    assert compared == [((6, 4), True)]


def test_a_frozen_state_is_saved_lazily_without_a_copy_at_the_call(tmp_path):
    state = Frozen({"w": np.ones(40 << 20, np.uint8), "v": np.full(40 << 20, 3, np.uint8)})
    with penstock.CheckpointStore(tmp_path) as store:
        report = store.save_async(1, state, lazy=True).result()
        assert not any("copied at the call" in text for text in report.fallbacks)
        # Without `Frozen`, arrays of this size are copied at the call.
        plain = store.save_async(2, state.value, lazy=True).result()
    assert any("copied at the call" in text for text in plain.fallbacks)
    for step in (1, 2):
        loaded = store.load(step)
        assert all(np.array_equal(loaded[name], state.value[name]) for name in state.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_frozen_state_is_saved_as_any_other(tmp_path, is_async):
    state = {"w": in_pieces(np.arange(12).reshape(4, 3), 2), "step": 3}
    with penstock.Saver() as saver:
        if is_async:
            saver.save_async(tmp_path / "ckpt", Frozen(state), lazy=True)
        else:
            saver.save(tmp_path / "ckpt", Frozen(state))
    loaded = penstock.load(tmp_path / "ckpt")
    assert loaded["step"] == 3
    assert np.array_equal(loaded["w"], np.arange(12).reshape(4, 3))
