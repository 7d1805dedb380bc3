"""`CheckpointStore`: retention, skipped steps, and the errors' remedies."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
import warnings

import numpy as np
import pytest
import torch

import penstock
from compare import assert_same
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PenstockWarning,
    UnsupportedStateError,
)


def state_of(step):
    return {"w": torch.full((50,), float(step)), "step": step}


@pytest.fixture
def store(tmp_path):
    """Saves steps 10 to 50."""
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (10, 20, 30, 40, 50):
        store.save(step, state_of(step))
    return store


def shard_of(store, step):
    return next(file for file in os.scandir(store.path(step)) if file.name.startswith("shard"))


def damage_data(store, step):
    with open(shard_of(store, step).path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def damage_manifest(store, step):
    file = os.path.join(store.path(step), "manifest.json")
    with open(file, "r+b") as opened:
        opened.write(b"x")


def make_incomplete(store, step):
    os.unlink(os.path.join(store.path(step), "manifest.json"))


# Saving and loading.


def test_the_newest_step_loads(store):
    assert_same(store.load(), state_of(50))


@pytest.mark.parametrize("step", [10, 30, 50])
def test_any_step_loads(store, step):
    assert_same(store.load(step), state_of(step))


def test_steps_are_ordered_by_number_not_by_time(tmp_path):
    store = penstock.CheckpointStore(tmp_path)
    for step in (100, 9, 1000, 99):
        store.save(step, state_of(step))
    os.utime(store.path(9))
    assert store.steps() == [9, 99, 100, 1000]
    assert store.latest() == 1000
    assert store.load()["step"] == 1000


def test_the_report_tells_the_step_and_where(store, tmp_path):
    report = store.save(60, state_of(60), metadata={"note": "x"})
    assert (report.step, report.path) == (60, store.path(60))
    info = penstock.inspect(store.path(60))
    assert (info.step, info.metadata, info.id) == (60, {"note": "x"}, report.checkpoint_id)


def test_a_step_that_is_complete_is_not_replaced_unasked(store):
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        store.save(30, state_of(31))
    assert_same(store.load(30), state_of(30))


def test_a_step_is_replaced_on_request(store):
    store.save(30, state_of(31), overwrite=True)
    assert_same(store.load(30), state_of(31))
    assert len(os.listdir(store.path(30))) == 3


def test_an_incomplete_step_can_be_saved_again(store):
    make_incomplete(store, 50)
    store.save(50, state_of(51))
    assert_same(store.load(50), state_of(51))


def test_arguments_reach_the_load(store):
    target = {"w": torch.zeros(50), "step": 0}
    reports = []
    assert store.load(into=target, report=reports.append) is target
    assert_same(target, state_of(50))
    assert (reports[0].step, reports[0].verified) == (50, True)
    assert_same(store.load(20, keys="w"), {"w": state_of(20)["w"]})


def test_the_options_of_the_store_are_used(tmp_path):
    options = penstock.Options(engine="threads", direct="off")
    store = penstock.CheckpointStore(tmp_path, options=options)
    assert store.save(1, state_of(1)).engine == "threads"
    reports = []
    store.load(report=reports.append)
    assert (reports[0].engine, reports[0].direct_io) == ("threads", False)


@pytest.mark.parametrize("step", [-1, 2**63, True, 1.0, "1", None])
def test_a_step_that_is_none_is_refused(store, step):
    with pytest.raises((TypeError, ValueError)):
        store.save(step, {})


@pytest.mark.parametrize("step", [0, 12_345_678_901, 2**63 - 1, np.int64(7)])
def test_any_step_number_works(tmp_path, step):
    store = penstock.CheckpointStore(tmp_path)
    store.save(step, {"x": 1})
    assert store.steps() == [int(step)]
    assert store.load(step) == {"x": 1}


# An empty store.


def test_an_empty_store_has_nothing_to_load(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "none")
    assert (store.steps(), store.latest(), store.scan(), store.sweep()) == ([], None, [], [])
    with pytest.raises(CheckpointNotFoundError, match=r"store\.save") as raised:
        store.load()
    assert raised.value.path == str(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_step_that_is_not_there_is_not_found(store):
    for call in (store.load, store.verify, store.delete):
        with pytest.raises(CheckpointNotFoundError) as raised:
            call(35)
        assert raised.value.path == store.path(35)


def test_a_store_of_unfinished_steps_says_so(store):
    for step in store.steps():
        make_incomplete(store, step)
    with pytest.raises(CheckpointNotFoundError, match="incomplete"):
        store.load()


def test_what_is_no_step_is_left_alone(store, tmp_path):
    root = tmp_path / "store"
    for name in ("step-60", "step-00000000060", "step-000000006x", "notes", "step-0000000061.tmp"):
        (root / name).mkdir()
    (root / "step-0000000060").write_text("a file")
    assert store.steps() == [10, 20, 30, 40, 50]
    store.sweep()
    assert len(os.listdir(root)) >= 11


# Skipped steps.


def test_an_incomplete_step_is_passed_over_and_named(store):
    make_incomplete(store, 50)
    with pytest.warns(PenstockWarning, match="step 50 was never finished"):
        assert store.load()["step"] == 40
    assert store.steps() == [10, 20, 30, 40]


@pytest.mark.parametrize("kind", ["manifest", "part missing", "shard missing", "shard cut"])
def test_a_damaged_newest_step_is_passed_over_with_a_warning(store, kind):
    path = store.path(50)
    if kind == "manifest":
        damage_manifest(store, 50)
    elif kind == "shard cut":
        os.truncate(shard_of(store, 50).path, 4100)
    else:
        name = next(n for n in os.listdir(path) if n.startswith(kind.partition(" ")[0]))
        os.unlink(os.path.join(path, name))
    with pytest.warns(PenstockWarning, match="passed over") as caught:
        assert_same(store.load(), state_of(40))
    assert path in str(caught[0].message)
    assert caught[0].filename == __file__
    assert [info.state for info in store.scan()] == ["complete"] * 4 + ["damaged"]
    assert store.scan()[-1].reason


def test_a_checkpoint_of_another_step_is_damage(store):
    shutil.rmtree(store.path(50))
    shutil.copytree(store.path(40), store.path(50))
    with pytest.warns(PenstockWarning):
        assert store.load()["step"] == 40


def test_damage_that_shows_while_reading_names_the_step_before(store):
    damage_data(store, 50)
    make_incomplete(store, 40)
    with pytest.raises(CorruptCheckpointError, match=r"store\.load\(step=30\)") as raised:
        store.load()
    assert raised.value.tensor == "w"
    assert raised.value.file == shard_of(store, 50).name
    assert_same(store.load(step=30), state_of(30))


def test_damage_of_the_only_step_says_that_there_is_none_before(tmp_path):
    store = penstock.CheckpointStore(tmp_path)
    store.save(1, state_of(1))
    damage_data(store, 1)
    with pytest.raises(CorruptCheckpointError, match="no earlier step"):
        store.load()


def test_a_damaged_step_asked_for_by_number_is_an_error(store):
    damage_manifest(store, 30)
    with pytest.raises(CorruptCheckpointError, match="step=20"):
        store.load(30)


def test_an_incomplete_step_asked_for_by_number_is_an_error(store):
    make_incomplete(store, 30)
    with pytest.raises(IncompleteCheckpointError):
        store.load(30)


# Retention.


def saved(root, steps, **retention):
    store = penstock.CheckpointStore(root, **retention)
    for step in steps:
        store.save(step, {"step": step})
    return store


def test_everything_is_kept_unless_told(tmp_path):
    assert saved(tmp_path, range(12)).steps() == list(range(12))


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path, keep):
    assert saved(tmp_path, range(8), keep_last=keep).steps() == list(range(8 - keep, 8))


def test_multiples_are_kept_as_well(tmp_path):
    store = saved(tmp_path, range(5, 60, 5), keep_last=2, keep_every=20)
    assert store.steps() == [20, 40, 50, 55]


def test_deleted_steps_leave_nothing_behind(tmp_path):
    saved(tmp_path, range(5), keep_last=1)
    assert [name for name in os.listdir(tmp_path) if name.startswith("step")] == ["step-0000000004"]


def test_the_newest_step_that_was_read_back_is_kept(tmp_path):
    store = saved(tmp_path, [1, 2], keep_last=1)
    store.load()
    store.save(3, {"step": 3})
    store.save(4, {"step": 4})
    assert store.steps() == [2, 4]
    assert store.verify(4).ok
    store.save(5, {"step": 5})
    assert store.steps() == [4, 5]


def test_a_partial_load_does_not_count_as_read_back(tmp_path):
    store = saved(tmp_path, [1, 2], keep_last=1)
    store.load(keys="step")
    store.save(3, {"step": 3})
    assert store.steps() == [3]


def test_a_load_without_checks_does_not_count_as_read_back(tmp_path):
    saved(tmp_path, [1, 2], keep_last=1)
    unchecked = penstock.CheckpointStore(
        tmp_path, keep_last=1, options=penstock.Options(verify=False)
    )
    unchecked.load()
    unchecked.save(3, {"step": 3})
    assert unchecked.steps() == [3]


def test_a_replaced_step_is_no_longer_the_one_that_was_read_back(tmp_path):
    store = saved(tmp_path, [1, 2], keep_last=1)
    store.load(2)
    store.save(2, {"step": "another"}, overwrite=True)
    store.save(3, {"step": 3})
    assert store.steps() == [3]


def test_an_older_step_read_back_counts_once_the_newer_one_was_replaced(tmp_path):
    store = saved(tmp_path, [1, 2])
    store.verify(2)
    store.save(2, {"step": "another"}, overwrite=True)
    store.verify(1)
    keeping = penstock.CheckpointStore(tmp_path, keep_last=1)
    keeping.save(3, {"step": 3})
    assert 1 in keeping.steps()


def test_damaged_and_incomplete_steps_do_not_count_and_are_not_deleted(tmp_path):
    store = saved(tmp_path, [1, 2, 3, 4])
    damage_manifest(store, 4)
    make_incomplete(store, 3)
    keeping = penstock.CheckpointStore(tmp_path, keep_last=2)
    keeping.save(5, {"step": 5})
    assert keeping.steps() == [2, 5]
    assert [info.step for info in keeping.scan()] == [2, 3, 4, 5]


def test_a_failed_save_deletes_nothing(tmp_path):
    store = saved(tmp_path, [1, 2], keep_last=2)
    with pytest.raises(UnsupportedStateError):
        store.save(3, {"x": object()})
    assert store.steps() == [1, 2]


def test_saving_an_older_step_keeps_the_newest(tmp_path):
    store = saved(tmp_path, [10, 20], keep_last=2)
    store.save(5, {"step": 5})
    assert 20 in store.steps()
    assert 10 in store.steps()


@pytest.mark.parametrize(
    "arguments",
    [{"keep_last": 0}, {"keep_last": -1}, {"keep_last": 1, "keep_every": 0}, {"keep_every": 5}],
)
def test_retention_that_makes_no_sense_is_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match="keep_"):
        penstock.CheckpointStore(tmp_path, **arguments)


# Sweeping.


def test_a_sweep_removes_what_dead_saves_left(store, tmp_path):
    make_incomplete(store, 50)
    orphan = f"shard-00000-00.{'a' * 32}.safetensors"
    (tmp_path / "store" / "step-0000000010" / orphan).write_bytes(b"x" * 100)
    swept = store.sweep()
    assert {entry.path for entry in swept} == {store.path(50), store.path(10)}
    assert dict(swept)[store.path(10)] == 100
    assert not os.path.exists(store.path(50))
    assert store.steps() == [10, 20, 30, 40]
    assert all(store.verify(step).ok for step in store.steps())
    assert store.sweep() == []


def test_a_sweep_leaves_files_of_the_user_and_damaged_steps(store, tmp_path):
    make_incomplete(store, 50)
    damage_manifest(store, 40)
    mine = tmp_path / "store" / "step-0000000050" / "notes.txt"
    mine.write_text("mine")
    before = sorted(os.listdir(store.path(40)))
    store.sweep()
    assert mine.read_text() == "mine"
    assert sorted(os.listdir(store.path(40))) == before


def leave_orphans(path, count):
    """Leaves the files of many dead saves, whose removal takes a while."""
    os.makedirs(path, exist_ok=True)
    for number in range(count):
        name = f"shard-00000-00.{number:032x}.safetensors"
        with open(os.path.join(path, name), "wb") as file:
            file.write(b"x")


@pytest.mark.parametrize("delay_ms", [1, 5, 20])
def test_a_save_that_begins_during_a_sweep_keeps_its_files(tmp_path, delay_ms):
    store = penstock.CheckpointStore(tmp_path / "store")
    leave_orphans(store.path(1), 5000)
    sweeper = threading.Thread(target=store.sweep)
    sweeper.start()
    time.sleep(delay_ms / 1000)
    store.save(1, state_of(1))
    sweeper.join()
    assert_same(store.load(1), state_of(1))


@pytest.mark.parametrize("delay_ms", [1, 5, 20])
def test_a_save_that_begins_while_another_tidies_up_keeps_its_files(tmp_path, delay_ms):
    path = tmp_path / "ckpt"
    leave_orphans(path, 5000)
    other = threading.Thread(target=penstock.save, args=(path, state_of(1)))
    other.start()
    while not (path / "manifest.json").exists():
        time.sleep(0.0005)
    time.sleep(delay_ms / 1000)
    penstock.save(path, state_of(2), overwrite=True)
    other.join()
    assert_same(penstock.load(path), state_of(2))


def test_delete_frees_what_it_says(store):
    size = sum(file.stat().st_size for file in os.scandir(store.path(30)))
    assert store.delete(30) == size
    assert store.steps() == [10, 20, 40, 50]
    assert not os.path.exists(store.path(30))


def test_delete_takes_incomplete_and_damaged_steps(store):
    make_incomplete(store, 10)
    damage_manifest(store, 20)
    store.delete(10)
    store.delete(20)
    assert [info.step for info in store.scan()] == [30, 40, 50]


def test_delete_keeps_files_of_the_user(store, tmp_path):
    mine = tmp_path / "store" / "step-0000000030" / "notes.txt"
    mine.write_text("mine")
    store.delete(30)
    assert mine.read_text() == "mine"
    assert 30 not in store.steps()


def test_verify_tells_damage_as_a_result(store):
    assert store.verify(50).ok
    damage_data(store, 50)
    result = store.verify(50)
    assert not result.ok
    assert result.problems[0].tensor == "w"
    damage_manifest(store, 40)
    assert store.verify(40).problems[0].file == "manifest.json"


def test_verify_of_an_incomplete_step_is_no_success(store):
    make_incomplete(store, 50)
    with pytest.raises(IncompleteCheckpointError):
        store.verify(50)


def test_a_store_that_cannot_delete_warns_and_the_save_stands(tmp_path, monkeypatch, need_root):
    store = saved(tmp_path, [1, 2], keep_last=1)
    victim = tmp_path / "step-0000000002"
    # Even root may not remove from an immutable directory.
    if os.system(f"chattr +i '{victim}' 2>/dev/null") != 0:
        pytest.skip("chattr +i does not work on this file system")
    try:
        with pytest.warns(PenstockWarning, match="could not be deleted"):
            store.save(3, {"step": 3})
    finally:
        os.system(f"chattr -i '{victim}'")
    assert store.load()["step"] == 3


def test_paths_of_any_kind_work(tmp_path):
    for root in (str(tmp_path / "a"), tmp_path / "b", os.fsencode(tmp_path / "c ü\n")):
        store = penstock.CheckpointStore(root)
        store.save(1, state_of(1))
        assert_same(store.load(), state_of(1))
        assert store.root == os.fsdecode(root)


def test_a_path_that_is_no_text_works(tmp_path):
    """File names are bytes; they need not be UTF-8."""
    root = os.fsencode(tmp_path) + b"/\xff\xfe"
    store = penstock.CheckpointStore(root)
    store.save(1, state_of(1))
    assert os.path.exists(root + b"/step-0000000001/manifest.json")
    assert_same(store.load(), state_of(1))
    penstock.save(root + b"/other", {"x": 1})
    assert penstock.load(root + b"/other") == {"x": 1}
    assert penstock.verify(root + b"/other").ok


def test_a_relative_path_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    penstock.save("ckpt", {"x": 1})
    assert penstock.load("ckpt") == {"x": 1}
    store = penstock.CheckpointStore("store")
    store.save(1, {"x": 2})
    assert store.load() == {"x": 2}


def test_a_store_is_told_from_a_checkpoint_and_from_anything_else(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")
    store.save(7, {"a": 1})
    for call in (penstock.load, penstock.inspect, penstock.verify):
        with pytest.raises(CheckpointNotFoundError, match="step-0000000007"):
            call(tmp_path / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointNotFoundError):
        penstock.load(tmp_path / "other")


def test_a_list_of_names_costs_its_length(tmp_path):
    """Not its length times the number of leaves, which would take an hour here."""
    state = {f"leaf{i}": i for i in range(100_000)}
    penstock.save(tmp_path / "ckpt", state)
    assert penstock.load(tmp_path / "ckpt", keys=list(state)) == state


# Unfinished steps, and steps without a manifest.


def loads(store):
    """Returns each way to load the newest step; each returns the step it found."""
    into = penstock.Training(rng=False, w=torch.zeros(50), step=0)
    return {
        "load": lambda: store.load()["step"],
        "fallback": lambda: store.load(fallback=True)["step"],
        "resume": lambda: store.resume(into),
    }


@pytest.mark.parametrize("how", ["load", "fallback", "resume"])
def test_the_newest_without_a_manifest_is_told_once(store, how):
    make_incomplete(store, 50)
    make_incomplete(store, 40)
    with pytest.warns(PenstockWarning, match="step 50 was never finished, or") as told:
        assert loads(store)[how]() == 30
    assert len(told) == 1
    assert "step 30 is loaded instead" in str(told[0].message)
    assert f"penstock verify --explain {store.path(50)}" in str(told[0].message)
    assert told[0].filename == __file__


@pytest.mark.parametrize("how", ["load", "fallback", "resume"])
def test_nothing_is_told_of_what_is_below_empty_or_under_way(store, how):
    make_incomplete(store, 30)
    os.mkdir(store.path(60))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loads(store)[how]() == 50
        # A running save holds a lock on its directory.
        make_incomplete(store, 50)
        directory = os.open(store.path(50), os.O_RDONLY)
        fcntl.flock(directory, fcntl.LOCK_SH)
        assert loads(store)[how]() == 40
        os.close(directory)
    with pytest.warns(PenstockWarning, match="step 50 was never finished"):
        assert loads(store)[how]() == 40


def test_a_step_that_is_named_says_nothing_of_those_above(store):
    make_incomplete(store, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(40)["step"] == 40
        assert store.load(40, fallback=True)["step"] == 40
