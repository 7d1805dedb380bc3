"""Retention follows its settings, keeps protected and good steps, and announces deletions."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import penstock
from conftest import mounted
from penstock.checkpoint.loading.dcp_files import MARK, METADATA, drop_mark
from penstock.checkpoint.saving.rank_save import RankAttempt
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PenstockWarning,
    ProtectedCheckpointError,
    StorageError,
)

pytestmark = pytest.mark.quick


def saved(root, steps, **retention):
    store = penstock.CheckpointStore(root, **retention)
    for step in steps:
        store.save(step, {"step": step}, metadata={"loss": 1 / (1 + step)})
    return store


def damage_data(store, step):
    shard = next(file for file in os.scandir(store.path(step)) if file.name.startswith("shard"))
    with open(shard.path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


# keep=


def test_a_function_keeps_what_it_wants_by_step_and_metadata(tmp_path):
    asked = []

    def keep(step, metadata):
        asked.append((step, metadata))
        return step == 2 or metadata["loss"] > 0.9

    store = saved(tmp_path, range(5), keep_last=1, keep=keep)
    assert store.steps() == [0, 2, 4]
    assert (1, {"loss": 0.5}) in asked
    assert 4 not in {step for step, _ in asked}, "what stays anyway is not asked about"


def test_a_function_that_raises_deletes_nothing_and_the_save_stands(tmp_path):
    saved(tmp_path, [1, 2, 3])

    def keep(step, metadata):
        if step == 2:
            raise KeyError("best")
        return False

    store = penstock.CheckpointStore(tmp_path, keep_last=1, keep=keep)
    with pytest.warns(PenstockWarning, match=r"nothing was deleted.*KeyError") as caught:
        store.save(4, {"step": 4})
    assert caught[0].filename == __file__
    assert store.steps() == [1, 2, 3, 4]
    with pytest.raises(KeyError):
        store.retain()
    assert store.steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("answer", [None, 1, "yes", []])
def test_an_answer_that_is_no_bool_deletes_nothing(tmp_path, answer):
    """A function without a return would delete everything."""
    saved(tmp_path, [1, 2])
    store = penstock.CheckpointStore(tmp_path, keep_last=1, keep=lambda *_: answer)
    with pytest.warns(PenstockWarning, match="must be True or False"):
        store.save(3, {"step": 3})
    assert store.steps() == [1, 2, 3]


def test_a_numpy_bool_is_an_answer(tmp_path):
    keep = lambda step, _: np.bool_(step == 1)  # noqa: E731
    assert saved(tmp_path, [1, 2, 3], keep_last=1, keep=keep).steps() == [1, 3]


@pytest.mark.parametrize("arguments", [{"keep": print}, {"keep_last": 1, "keep": "best"}])
def test_a_function_that_makes_no_sense_is_refused(tmp_path, arguments):
    with pytest.raises((TypeError, ValueError), match="keep"):
        penstock.CheckpointStore(tmp_path, **arguments)


def test_nothing_is_deleted_before_the_new_step_is_durable(tmp_path):
    seen = []
    store = penstock.CheckpointStore(tmp_path, keep_last=1)

    def keep(step, metadata):
        seen.append((step, store.steps()))
        return False

    saved(tmp_path, [1, 2, 3], keep_last=1, keep=keep)
    assert seen == [(1, [1, 2]), (2, [2, 3])]


# Announcements.


def test_a_dry_run_tells_what_retain_then_does(tmp_path):
    saved(tmp_path, [1, 2, 3, 4, 6, 7])
    keep = lambda step, _: step == 3  # noqa: E731
    store = penstock.CheckpointStore(tmp_path, keep_last=1, keep_every=4, keep=keep)
    store.protect(1)
    store.verify(2)
    told = store.retain(dry_run=True)
    assert (told.dry_run, told.deleted) == (True, (6,))
    assert told.kept == {
        1: "protected",
        2: "the newest that was read back whole",
        3: "keep() says so",
        4: "a multiple of keep_every",
        7: "among the newest",
    }
    assert store.steps() == [1, 2, 3, 4, 6, 7]
    done = store.retain()
    assert (done.dry_run, done.deleted, done.kept) == (False, told.deleted, told.kept)
    assert store.steps() == [1, 2, 3, 4, 7]


def test_a_store_that_keeps_all_says_so(tmp_path):
    report = saved(tmp_path, [1, 2]).retain(dry_run=True)
    assert (report.deleted, set(report.kept.values())) == ((), {"everything is kept"})


# Protection.


def test_a_protected_step_stays_until_it_is_unprotected(tmp_path):
    store = saved(tmp_path, [1], keep_last=1)
    store.protect(1)
    for step in (2, 3):
        store.save(step, {"step": step})
    assert (store.steps(), store.protected()) == ([1, 3], [1])
    store.unprotect(1)
    store.unprotect(1)
    store.save(4, {"step": 4})
    assert (store.steps(), store.protected()) == ([4], [])


def test_deleting_a_protected_step_needs_force(tmp_path):
    store = saved(tmp_path, [1, 2])
    store.protect(1)
    with pytest.raises(ProtectedCheckpointError, match="force=True") as raised:
        store.delete(1)
    assert raised.value.path == store.path(1)
    assert store.load(1) == {"step": 1}
    assert store.delete(1, force=True) > 0
    assert not os.path.exists(store.path(1))


def test_what_is_not_there_cannot_be_protected(tmp_path):
    store = saved(tmp_path, [1])
    for call in (store.protect, store.unprotect):
        with pytest.raises(CheckpointNotFoundError):
            call(2)
        with pytest.raises(TypeError):
            call("1")
    os.mkdir(store.path(3))
    with pytest.raises(IncompleteCheckpointError):
        store.protect(3)


# The good step is kept.


def test_the_only_good_step_outlives_any_number_of_bad_ones(tmp_path):
    store = penstock.CheckpointStore(tmp_path, keep_last=2)
    state = {"w": np.arange(1000.0)}
    for step in range(1, 9):
        store.save(step, state)
        if step == 1:
            store.load()
        else:
            damage_data(store, step)
    assert store.steps() == [1, 7, 8]
    assert store.load(1)["w"][5] == 5


def test_steps_found_damaged_do_not_push_out_those_that_load(tmp_path):
    saved(tmp_path, [1, 2])
    store = penstock.CheckpointStore(tmp_path)
    for step in (3, 4):
        store.save(step, {"w": np.arange(1000.0)})
        damage_data(store, step)
    assert not store.verify(3).ok
    with pytest.raises(CorruptCheckpointError):
        store.load()
    report = penstock.CheckpointStore(tmp_path, keep_last=2).retain(dry_run=True)
    assert report.deleted == ()
    assert report.kept[3] == report.kept[4] == "damaged"


def test_marks_of_two_processes_are_all_there(tmp_path):
    """Each process verifies its own half of the steps at the same time."""
    steps = range(12)
    saved(tmp_path, steps)
    script = textwrap.dedent("""
        import sys, penstock
        store = penstock.CheckpointStore(sys.argv[1])
        for step in map(int, sys.argv[2:]):
            assert store.verify(step).ok
    """)
    halves = [list(map(str, steps[i::2])) for i in range(2)]
    running = [subprocess.Popen([sys.executable, "-c", script, tmp_path, *half]) for half in halves]
    assert [process.wait() for process in running] == [0, 0]
    marks = penstock.CheckpointStore(tmp_path).marks()
    assert list(marks) == list(steps)
    assert all(mark.is_good for mark in marks.values())


# A full disk.


def test_a_full_disk_says_how_much_is_missing(tmp_path, need_root):
    with mounted("tmpfs", tmp_path / "small", 8 << 20) as directory:
        with pytest.raises(StorageError) as raised:
            penstock.save(directory / "ckpt", {"w": np.zeros(4 << 20)})
        error = raised.value
        assert 32 << 20 <= error.needed_bytes < 33 << 20
        assert 7 << 20 <= error.free_bytes <= 8 << 20
        assert str(error.needed_bytes) in str(error)
        with pytest.raises(StorageError) as raised:
            penstock.save("/proc/none", {"x": 1})
        assert (raised.value.needed_bytes, raised.value.free_bytes) == (None, None)


def test_a_directory_that_a_save_has_begun_in_keeps_what_dcp_looks_for(tmp_path):
    path = tmp_path / "step-0000000001"
    path.mkdir()
    (path / METADATA).write_bytes(MARK)
    attempt = RankAttempt.begin(str(path), overwrite=False)
    drop_mark(str(path))
    assert os.listdir(path) == [METADATA]
    attempt.write_shards(0, [], penstock.Options().to_native())
    attempt.commit({0: attempt.write_part('{"step":1}')}, metadata="{}", overwrite=False)
    store = penstock.CheckpointStore(tmp_path)
    assert store.load() == {"step": 1}
    drop_mark(str(path))
    assert (path / METADATA).exists()
    store.delete(1)
    assert not path.exists()
    drop_mark(str(path))
