"""A running save: progress, failure and cancellation; every failure is raised somewhere."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock
from background import SLOWLY, held, in_the_way
from conftest import mounted
from penstock.errors import (
    CheckpointExistsError,
    PenstockWarning,
    SaveCancelledError,
    SaveInProgressError,
    StorageError,
    UnsupportedStateError,
)

MIB = 1 << 20


torch.set_num_threads(1)


def tree(root):
    """Paths below a directory, without the history of a store."""
    paths = sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))
    return [path for path in paths if path != "history.jsonl"]


def test_a_failure_is_the_results_every_time_and_nobody_elses(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)
    pending = store.save_async(1, {"w": torch.ones(MIB)})
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            pending.result()
        assert caught.value.path == pending.path
    assert isinstance(pending.exception(), StorageError)
    assert pending.done()
    assert pending.wait_staged(0)
    pending.stage()
    assert "failed" in repr(pending)
    assert tree(disk_path) == ["store", "store/step-0000000001"]
    store.save_async(2, {"w": 2}).result()
    store.wait()
    store.save(3, {"w": 3})
    store.close()
    assert store.steps() == [2, 3]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("how", ["save", "save_async", "skip", "wait", "close", "with"])
def test_a_failure_that_nobody_asked_for_comes_up_once(disk_path, how, lazy):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)
    pending = store.save_async(1, {"w": torch.ones(MIB)}, lazy=lazy)
    while not pending.done():
        time.sleep(0.001)

    def act():
        if how == "save":
            store.save(2, {"w": 2})
        elif how == "save_async":
            store.save_async(2, {"w": 2}).result()
        elif how == "skip":
            store.save_async(2, {"w": 2}, if_busy="skip").result()
        elif how == "with":
            with store:
                pass
        else:
            getattr(store, how)()

    with pytest.raises(StorageError) as caught:
        act()
    assert caught.value.path == pending.path
    assert store.steps() == []
    act()
    store.save(3, {"w": 3})
    assert store.steps()[-1] == 3
    assert isinstance(pending.exception(), StorageError)


def test_a_disk_that_is_full_fails_the_save_and_nothing_stays_behind(tmp_path, need_root):
    with mounted("tmpfs", tmp_path / "small", 16 * MIB) as small:
        store = penstock.CheckpointStore(small / "store")
        store.save(0, {"w": 0})
        for lazy in (False, True):
            pending = store.save_async(1, {"w": torch.ones(8 * MIB)}, lazy=lazy)
            with pytest.raises(StorageError) as caught:
                pending.result()
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.needed_bytes > 32 * MIB > caught.value.free_bytes
            assert not os.path.exists(pending.path)
        store.save_async(2, {"w": torch.ones(MIB)}).result()
        assert store.steps() == [0, 2]
        assert store.sweep() == []


def test_a_directory_that_is_removed_under_a_save_fails_it(disk_path):
    store = penstock.CheckpointStore(disk_path / "store", options=SLOWLY)
    pending = store.save_async(1, torch.ones(32 * MIB), lazy=True)
    while not pending.progress().bytes_done:
        assert not pending.done()
        time.sleep(0.0005)
    shutil.rmtree(store.root)
    assert isinstance(pending.exception(), penstock.PenstockError)
    store.save_async(2, {"w": 2}).result()
    assert store.steps() == [2]


def test_what_can_be_refused_at_the_call_is_refused_there(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    store.save(1, {"w": 1})
    before = tree(disk_path)
    for lazy in (False, True):
        with pytest.raises(CheckpointExistsError):
            store.save_async(1, {"w": 2}, lazy=lazy)
        with pytest.raises(UnsupportedStateError, match=r"a\.0"):
            store.save_async(2, {"a": [object()]}, lazy=lazy)
        with pytest.raises(ValueError, match="if_busy"):
            store.save_async(2, {}, if_busy="later", lazy=lazy)
        with pytest.raises(ValueError, match="step"):
            store.save_async(-1, {}, lazy=lazy)
        with pytest.raises(TypeError):
            store.save_async("1", {}, lazy=lazy)
        with pytest.raises(TypeError):
            store.save_async(2, {}, metadata={"x": object()}, lazy=lazy)
    assert tree(disk_path) == before
    store.wait()
    store.save_async(1, {"w": 3}, overwrite=True).result()
    assert store.load(1) == {"w": 3}


def test_a_step_that_is_being_saved_exists_by_the_time_it_counts(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1) as release:
        pending = store.save_async(1, {"w": 1})
        threading.Timer(0.05, release).start()
        with pytest.raises(CheckpointExistsError):
            store.save_async(1, {"w": 2})
    pending.result()
    assert store.load(1) == {"w": 1}


def test_a_save_by_somebody_else_is_not_replaced(disk_path):
    """The faster save wins: nearly always the one that does not wait for the lock."""
    store = penstock.CheckpointStore(disk_path / "store")
    other = None
    with held(store, 1):
        pending = store.save_async(1, {"w": 1})
        os.rename(store.path(1), disk_path / "aside")
        try:
            penstock.save(store.path(1), {"w": "other"}, step=1)
        except CheckpointExistsError as error:
            other = error
    own = pending.exception()
    assert (own is None) != (other is None)
    assert own is None or isinstance(own, CheckpointExistsError)
    assert store.load(1) == {"w": 1 if own is None else "other"}


@pytest.mark.parametrize("lazy", [False, True])
def test_an_error_does_not_keep_the_state(disk_path, lazy):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)

    def fail_to_save():
        state = {"t": torch.ones(MIB), "a": np.ones(MIB)}
        pending = store.save_async(1, state, lazy=lazy)
        leaves = [weakref.ref(leaf) for leaf in state.values()]
        with pytest.raises(StorageError):
            pending.result()
        return pending, leaves

    # The scheduler decides whether it fails during the copy or before.
    for _ in range(20):
        pending, leaves = fail_to_save()
        kept = pending.exception().with_traceback(None)
        del pending
        # The traceback held the frame that caught the error.
        gc.collect()
        assert [leaf() for leaf in leaves] == [None, None]
        assert isinstance(kept, StorageError)


def test_failures_that_were_heard_of_do_not_pile_up(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)
    gone = []
    for how in ("result", "wait", "cancel"):
        pending = store.save_async(1, {"w": torch.ones(1000)})
        gone.append(weakref.ref(pending))
        if how == "result":
            assert pending.exception() is not None
        elif how == "wait":
            with pytest.raises(StorageError):
                store.wait()
        else:
            pending.cancel()
            store.wait()
        del pending
    store.close()
    gc.collect()
    assert [one() for one in gone] == [None] * 3


def test_what_is_under_way_says_so(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1):
        pending = store.save_async(1, {"w": torch.ones(MIB)})
        assert (pending.step, pending.path) == (1, store.path(1))
        assert pending.stall_seconds > 0
        for wait in (pending.result, pending.exception):
            for timeout in (0, 0.01):
                with pytest.raises(TimeoutError, match="step-0000000001 is still"):
                    wait(timeout)
        assert not pending.done()
        assert "running" in repr(pending)
        assert pending.path in repr(pending)
        done, total = pending.progress()
        assert done == 0
        assert total >= 4 * MIB
    report = pending.result(60)
    assert pending.done()
    assert pending.exception(0) is None
    assert pending.result(0) is report
    assert "saved" in repr(pending)
    assert report.step == 1
    assert report.phases["stage"] > 0
    assert report.phases.keys() >= {"flatten", "plan", "stage", "write", "sync", "commit"}
    assert report.seconds >= pending.stall_seconds
    assert pending.progress().bytes_done == pending.progress().bytes_total == total
    assert penstock.inspect(pending.path).id == report.checkpoint_id


@pytest.mark.parametrize("lazy", [False, True])
def test_progress_rises_to_the_whole(disk_path, lazy):
    store = penstock.CheckpointStore(disk_path / "store", options=SLOWLY)
    pending = store.save_async(1, torch.ones(16 * MIB), lazy=lazy)
    seen = [pending.progress()]
    while not pending.done():
        seen.append(pending.progress())
    seen.append(pending.progress())
    done = [one.bytes_done for one in seen]
    assert done == sorted(done)
    assert {one.bytes_total for one in seen} == {seen[-1].bytes_done}
    assert seen[-1].bytes_done >= 64 * MIB


def test_every_save_that_copies_something_reports_its_stage(memory_path):
    store = penstock.CheckpointStore(memory_path / "store")
    for _ in range(50):
        report = store.save_async(1, {"w": np.ones(2000)}, overwrite=True).result()
        assert "stage" in report.phases


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_save_that_is_cancelled_leaves_nothing_and_nobody_else_hears_of_it(disk_path, lazy, when):
    store = penstock.CheckpointStore(disk_path / "store", options=SLOWLY)
    store.save(0, {"w": 0})
    state = torch.ones(16 * MIB)
    with held(store, 1) as release:
        os.rmdir(store.path(1)) if when == "while" else None
        pending = store.save_async(1, state, lazy=lazy)
        if when == "while":
            while not pending.progress().bytes_done:
                assert not pending.done()
        pending.cancel()
        release()
        with pytest.raises(SaveCancelledError):
            pending.result()
        assert pending.wait_staged(0)
    assert tree(store.root) in (
        ["step-0000000000", *tree_of_a_step(store, 0)],
        ["step-0000000000", *tree_of_a_step(store, 0), "step-0000000001"],
    )
    pending = store.save_async(1, state, lazy=lazy)
    pending.cancel()
    # A cancelled save is not reported again.
    store.save(2, {"w": 2})
    assert store.steps() == [0, 2]


def tree_of_a_step(store, step):
    root = Path(store.path(step))
    return [f"{root.name}/{name}" for name in tree(root)]


def test_to_cancel_what_is_saved_changes_nothing(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    pending = store.save_async(1, {"w": 1})
    pending.result()
    pending.cancel()
    pending.result()
    assert store.load(1) == {"w": 1}


def test_what_a_store_keeps_it_keeps_of_saves_in_the_background_too(disk_path):
    asked = []

    def keep(step, metadata):
        asked.append((step, metadata))
        return step == 2

    store = penstock.CheckpointStore(disk_path / "store", keep_last=2, keep_every=5, keep=keep)
    for step in range(9):
        store.save_async(step, {"w": step}, metadata={"step": step}, lazy=step % 2 == 0)
    pending = store.save_async(9, {"w": 9}, metadata={"step": 9})
    pending.result()
    assert store.steps() == [0, 2, 5, 8, 9]
    assert all(metadata == {"step": step} for step, metadata in asked)
    assert penstock.inspect(store.path(9)).metadata == {"step": 9}
    assert penstock.inspect(store.path(9)).step == 9


def test_a_newest_good_step_is_kept_and_a_save_leaves_no_mark(disk_path):
    store = penstock.CheckpointStore(disk_path / "store", keep_last=1)
    store.save_async(1, {"w": torch.ones(100)}).result()
    assert store.marks() == {}
    store.load(1)
    assert store.marks()[1].is_good
    for step in (2, 3, 4):
        store.save_async(step, {"w": torch.ones(100)}).result()
    assert store.steps() == [1, 4]
    store.save_async(1, {"w": torch.zeros(100)}, overwrite=True).result()
    assert 1 not in store.marks()


def test_a_function_keep_that_raises_fails_no_save(disk_path):
    def keep(step, metadata):
        raise RuntimeError("what do I know")

    store = penstock.CheckpointStore(disk_path / "store", keep_last=1, keep=keep)
    store.save_async(0, {"w": 0}).result()
    with held(store, 1) as release:
        pending = store.save_async(1, {"w": 1})
        with pytest.warns(PenstockWarning, match="what do I know"):
            settle(pending, release)
    assert store.steps() == [0, 1]


@pytest.mark.parametrize("how", ["result", "exception", "wait", "close", "save"])
def test_a_function_keep_that_waits_for_its_own_save_gets_an_error(disk_path, how):
    caught = []

    def keep(step, metadata):
        started.wait()
        waits = {
            "result": lambda: pending.result(),
            "exception": lambda: pending.exception(),
            "wait": store.wait,
            "close": store.close,
            "save": lambda: store.save(2, {"w": 2}),
        }
        with pytest.raises(SaveInProgressError, match="its own save calls") as error:
            waits[how]()
        caught.append(error.value)
        return False

    started = threading.Event()
    store = penstock.CheckpointStore(disk_path / "store", keep_last=1, keep=keep)
    store.save_async(0, {"w": 0}).result()
    pending = store.save_async(1, {"w": 1})
    started.set()
    assert pending.result(60).step == 1
    store.wait()
    assert [error.path for error in caught] == [store.path(1)]
    assert store.steps() == [1]


def settle(pending, release):
    release()
    pending.result()


def test_what_ends_the_block_of_a_store_is_heard_with_the_save_that_failed(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)

    def block():
        with store:
            store.save_async(1, {"w": 1})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        block()
    (note,) = caught.value.__notes__
    assert "failed" in note
    assert str(store.path(1)) in note


def test_a_store_stays_where_it_was_opened(disk_path, monkeypatch):
    monkeypatch.chdir(disk_path)
    store = penstock.CheckpointStore("store")
    with held(store, 1):
        pending = store.save_async(1, {"w": 1})
        (disk_path / "elsewhere").mkdir()
        monkeypatch.chdir(disk_path / "elsewhere")
    pending.result()
    assert penstock.load(disk_path / "store" / "step-0000000001") == {"w": 1}
