"""A damaged step makes way for a load and for the next save, and no data is lost."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.checkpoint.loading import load as loading
from penstock.checkpoint.saving.destination import Destination
from penstock.cli.ls import ls
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    PenstockWarning,
    StorageError,
)


def state_of(step):
    return {"w": np.full(5000, step), "b": np.arange(9), "step": step}


@pytest.fixture
def store(tmp_path):
    """Saves steps 10 to 30."""
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (10, 20, 30):
        store.save(step, state_of(step))
    return store


def file_of(store, step, kind):
    name = next(name for name in os.listdir(store.path(step)) if name.startswith(kind))
    return os.path.join(store.path(step), name)


def flip(store, step):
    with open(file_of(store, step, "shard"), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def damage(store, step, how):
    if how == "data":
        flip(store, step)
    elif how == "manifest":
        Path(file_of(store, step, "manifest")).write_text("{")
    else:
        os.unlink(file_of(store, step, how))


HOW = ["data", "manifest", "part", "shard"]


@pytest.fixture
def quiet():
    with warnings.catch_warnings(action="ignore"):
        yield


# The crash loop.


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("saves", ["save", "async", "lazy"])
def test_a_run_that_fell_back_comes_past_the_damaged_step(store, how, saves):
    damage(store, 30, how)
    before = sorted(os.listdir(store.path(30)))
    with pytest.warns(PenstockWarning, match="passed over.*quarantined as") as caught:
        assert store.load(fallback=True)["step"] == 20
    assert len(caught) == 1
    ((step, path),) = store.quarantined()
    assert (step, path) == (30, f"{store.root}/damaged-0000000030-0001")
    assert path in str(caught[0].message)
    assert sorted(os.listdir(path)) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load()["step"] == 20
        if saves == "save":
            store.save(30, state_of(31))
        else:
            store.save_async(30, state_of(31), lazy=saves == "lazy").result()
        assert (store.load()["step"], store.latest()) == (31, 30)
        assert store.sweep() == []
    assert store.quarantined() == [(30, path)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("saves", ["save", "async"])
def test_a_save_takes_the_place_of_what_is_damaged(store, how, saves):
    damage(store, 30, how)
    if how == "data":
        # Until a read finds the damage, the step counts as good.
        with pytest.raises(CheckpointExistsError):
            store.save(30, state_of(31))
        assert not store.verify(30).ok
    save = store.save if saves == "save" else lambda *both: store.save_async(*both).result()
    with pytest.warns(PenstockWarning, match="makes way for a new save.*quarantined as"):
        save(30, state_of(31))
    assert store.load()["step"] == 31
    assert [step for step, _ in store.quarantined()] == [30]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("saves", ["save", "async", "lazy"])
def test_what_is_damaged_outlives_a_loop_that_always_overwrites(store, how, saves):
    damage(store, 30, how)
    store.verify(30)
    before = sorted(os.listdir(store.path(30)))

    def save(number):
        state = state_of(number)
        if saves == "save":
            store.save(30, state, overwrite=True)
        else:
            store.save_async(30, state, overwrite=True, lazy=saves == "lazy").result()

    with pytest.warns(PenstockWarning, match="makes way for a new save.*quarantined as"):
        save(31)
    ((step, path),) = store.quarantined()
    assert (step, sorted(os.listdir(path))) == (30, before)
    # A good step is replaced.
    save(32)
    assert (store.load()["step"], len(store.quarantined())) == (32, 1)


def test_what_is_overwritten_need_not_be_set_aside(store):
    flip(store, 30)
    store.verify(30)

    class Refusing:
        def make_way(self, step):
            raise StorageError("busy", path=store.path(step), errno=errno.EBUSY)

    targets = [
        Destination(
            path=store.path(30),
            step=30,
            metadata="{}",
            overwrite=overwrite,
            store=Refusing(),
        )
        for overwrite in (True, False)
    ]
    with pytest.warns(PenstockWarning, match="is replaced.*not be quarantined: busy"):
        targets[0].make_way()
    with pytest.raises(StorageError, match="busy"):
        targets[1].make_way()


@pytest.mark.parametrize("saves", ["save", "async"])
def test_a_warning_that_is_an_error_fails_no_save(store, saves, capsys):
    damage(store, 30, "part")
    save = store.save if saves == "save" else lambda *both: store.save_async(*both).result()
    with warnings.catch_warnings(action="error"):
        save(30, state_of(31))
    assert store.load()["step"] == 31
    assert "makes way for a new save" in capsys.readouterr().err


def test_a_single_checkpoint_is_never_set_aside(store):
    damage(store, 30, "manifest")
    with pytest.raises(CheckpointExistsError):
        penstock.save(store.path(30), {"x": 1}, step=30)
    assert store.quarantined() == []


def test_a_good_step_gives_way_to_nobody(store):
    store.verify(30)
    with pytest.raises(CheckpointExistsError):
        store.save(30, state_of(31))
    with pytest.raises(penstock.PenstockError, match="not known to be damaged"):
        store.quarantine(30)
    with pytest.raises(CheckpointNotFoundError):
        store.quarantine(31)
    # A step replaced since it was found damaged is no longer damaged.
    flip(store, 30)
    store.verify(30)
    store.save(30, state_of(32), overwrite=True)
    with pytest.raises(CheckpointExistsError):
        store.save(30, state_of(33))
    assert store.load()["step"] == 32


# Before older weights are accepted.


def test_until_then_each_load_is_the_same_error(store):
    flip(store, 30)
    for _ in range(3):
        with pytest.raises(CorruptCheckpointError, match="fallback=True"):
            store.load()
    assert (store.latest(), store.steps()) == (20, [10, 20, 30])
    assert store.quarantined() == []
    # Flips the bit back, as if a copy were put in its place.
    flip(store, 30)
    assert store.load()["step"] == 30
    assert store.latest() == 30


def test_a_scrub_takes_a_damaged_step_out_of_the_way_of_latest(store):
    flip(store, 30)
    store.scrub()
    assert store.latest() == 20
    (Path(store.root) / "verified.json").write_text("{")
    assert store.latest() == 30, "nothing is known of it any more"


def test_a_device_that_fails_once_harms_nothing(store, monkeypatch):
    failures = [errno.EIO]
    read = loading.read

    def read_or_fail(path, *arguments):
        if path == store.path(30) and failures:
            raise StorageError("bad sector", path=path, errno=failures.pop())
        return read(path, *arguments)

    monkeypatch.setattr(loading, "read", read_or_fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load(fallback=True)["step"] == 30
    failures += [errno.EIO, errno.EIO]
    with pytest.warns(PenstockWarning, match="passed over"):
        assert store.load(fallback=True)["step"] == 20
    # Another host may read it, or this one once the storage is mounted again.
    assert (store.quarantined(), store.latest()) == ([], 30)
    assert store.load()["step"] == 30


def test_a_host_that_can_read_nothing_takes_nothing_away(store, monkeypatch):
    def fail(path, *arguments):
        raise StorageError("evicted", path=path, errno=errno.EIO)

    with monkeypatch.context() as evicted, warnings.catch_warnings(action="ignore"):
        evicted.setattr(loading, "read", fail)
        with pytest.raises(StorageError, match="evicted"):
            store.load(fallback=True)
    assert (store.quarantined(), store.latest()) == ([], 30)
    assert all(mark.is_good for mark in store.marks().values())
    with pytest.raises(CheckpointExistsError):
        store.save(30, state_of(31))


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_what_may_not_be_read_stays(store, monkeypatch, number):
    read = loading.read

    def read_or_fail(path, *arguments):
        if path == store.path(30):
            raise StorageError("no", path=path, errno=number)
        return read(path, *arguments)

    monkeypatch.setattr(loading, "read", read_or_fail)
    with pytest.warns(PenstockWarning, match="passed over"):
        assert store.load(fallback=True)["step"] == 20
    assert (store.quarantined(), store.steps()) == ([], [10, 20, 30])


def test_what_takes_a_newer_version_or_is_of_another_step_stays(store, quiet):
    newer = '{"format":"penstock-checkpoint","version":99}'
    Path(file_of(store, 30, "manifest")).write_text(newer)
    with pytest.raises(FormatVersionError):
        store.load(fallback=True)
    os.rename(store.path(20), store.path(40))
    assert store.load(10, fallback=True)["step"] == 10
    shutil.rmtree(store.path(30))
    assert store.load(fallback=True)["step"] == 10
    assert (store.quarantined(), os.path.exists(store.path(40))) == ([], True)
    with pytest.raises(CheckpointExistsError):
        store.save(40, state_of(40))


# Bounds and leftovers of the directory for damaged steps.


def test_the_last_few_and_protected_ones_are_kept(store, quiet):
    keeping = penstock.CheckpointStore(store.root, keep_last=2)
    for number in range(6):
        if number == 1:
            keeping.protect(30)
        flip(keeping, 30)
        assert keeping.load(fallback=True)["step"] == 20
        keeping.save(30, state_of(30))
    names = [Path(path).name for _, path in keeping.quarantined()]
    assert names == [f"damaged-0000000030-{number:04}" for number in (2, 4, 5, 6)]
    assert keeping.load()["step"] == 30
    # A store that keeps all steps keeps all of these.
    flip(store, 30)
    assert store.load(fallback=True)["step"] == 20
    store.save(30, state_of(30))
    assert len(store.quarantined()) == 5


def test_of_many_damaged_steps_the_newest_are_kept(store, quiet):
    for step in (40, 50, 60):
        store.save(step, state_of(step))
    for step in (20, 30, 40, 50, 60):
        flip(store, step)
    keeping = penstock.CheckpointStore(store.root, keep_last=2)
    assert keeping.load(fallback=True)["step"] == 10
    assert [step for step, _ in keeping.quarantined()] == [20, 30, 40, 50, 60]
    keeping.save(70, state_of(70))
    assert [step for step, _ in keeping.quarantined()] == [40, 50, 60]


def test_a_store_that_cannot_be_written_says_so_and_loads(store, need_root):
    damage(store, 30, "shard")
    if os.system(f"chattr +i '{store.root}' 2>/dev/null") != 0:
        pytest.skip("chattr +i does not work on this file system")
    try:
        with pytest.warns(PenstockWarning, match="could not be quarantined"):
            assert store.load(fallback=True)["step"] == 20
    finally:
        os.system(f"chattr -i '{store.root}'")
    assert [info.step for info in store.scan()] == [10, 20, 30]


def test_what_is_set_aside_can_be_looked_into_and_salvaged(store, tmp_path, capsys):
    # The flipped bit is in the last of 5000 numbers; the other array is intact.
    damage(store, 20, "manifest")
    flip(store, 30)
    store.verify(30)
    path = store.quarantine(30)
    explained = penstock.explain(path)
    assert (explained.step, explained.earlier_step) == (30, 10)
    assert not penstock.verify(path).ok
    report = penstock.salvage(path, tmp_path / "salvaged")
    assert report.step == 30
    assert ls.main([store.root], standalone_mode=False) == 0
    assert "quarantined" in capsys.readouterr().out
