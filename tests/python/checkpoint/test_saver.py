"""`penstock.Saver`: any paths, one after the other, with the promises of a store's saves."""

import os

import numpy as np
import pytest

import penstock
from penstock.errors import CheckpointExistsError, StorageError


def state(number):
    return {"w": np.full(1000, number), "step": number}


def test_paths_are_the_callers_and_the_state_may_change_at_once(tmp_path):
    with penstock.Saver() as saver:
        w = np.ones(100_000)
        pending = saver.save_async(tmp_path / "a=1.ckpt", {"w": w}, step=3, metadata={"by": "me"})
        w += 1
        assert pending.result().step == 3
        saver.save(tmp_path / "deep" / "b", state(2))
    assert penstock.load(tmp_path / "a=1.ckpt")["w"].max() == 1
    assert penstock.inspect(tmp_path / "a=1.ckpt").metadata == {"by": "me"}
    assert penstock.load(tmp_path / "deep" / "b")["step"] == 2


def test_what_comes_after_finds_the_checkpoint_complete(tmp_path):
    found = []
    with penstock.Saver() as saver:
        saver.save_async(
            tmp_path / "new",
            state(1),
            after=lambda: found.append(penstock.verify(tmp_path / "new").ok),
        )
    assert found == [True]


def test_one_that_is_there_stays(tmp_path):
    saver = penstock.Saver()
    saver.save(tmp_path / "a", state(1))
    with pytest.raises(CheckpointExistsError):
        saver.save_async(tmp_path / "a", state(2))
    with pytest.raises(CheckpointExistsError):
        saver.save(tmp_path / "a", state(2))
    assert penstock.load(tmp_path / "a")["step"] == 1
    saver.save(tmp_path / "a", state(2), overwrite=True)
    assert penstock.load(tmp_path / "a")["step"] == 2


def test_a_path_moves_with_no_working_directory(tmp_path, monkeypatch):
    os.mkdir(tmp_path / "here")
    os.mkdir(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    with penstock.Saver() as saver:
        saver.save_async("ckpt", state(1))
        monkeypatch.chdir(tmp_path / "there")
    assert os.listdir(tmp_path / "there") == []
    assert penstock.load(tmp_path / "here" / "ckpt")["step"] == 1


def test_the_error_of_a_save_that_nobody_has_seen_comes_from_the_next(tmp_path):
    saver = penstock.Saver()
    (tmp_path / "file").write_text("no directory")
    pending = saver.save_async(tmp_path / "file" / "ckpt", state(1), overwrite=True)
    while not pending.done():
        pending.wait_staged(0.01)
    with pytest.raises(StorageError):
        saver.save(tmp_path / "b", state(2))
    saver.save(tmp_path / "b", state(2))
    with pytest.raises(ValueError, match="if_busy"):
        saver.save_async(tmp_path / "c", state(2), if_busy="maybe")
    store = penstock.CheckpointStore(tmp_path / "store")
    store.save(1, state(1))
    with pytest.raises(CheckpointExistsError, match="store"):
        saver.save(tmp_path / "store", state(1))
