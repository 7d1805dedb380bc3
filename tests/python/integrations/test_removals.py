"""Plug-ins delete like a store does: not during a read, and never half."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import penstock
from penstock.checkpoint.loading.opened import OpenCheckpoint
from penstock.errors import IncompleteCheckpointError, PenstockWarning, StorageError
from penstock.plugin import remove_checkpoint


def save(path):
    """Saves a checkpoint with a framework's extra files beside it."""
    penstock.save(path, {"w": np.arange(50_000)})
    os.makedirs(os.path.join(path, "logs"))
    for name in ("trainer_state.json", "logs/events"):
        Path(path, name).write_text("{}")
    return str(path)


def by_transformers(root):
    from penstock.integrations.transformers import run

    for step in (1, 2):
        save(root / f"checkpoint-{step}")
    return str(root / "checkpoint-1"), lambda: run.rotate(str(root), 2, 1, set())


def by_accelerate(root):
    from penstock.integrations.accelerate import directories

    for number in (1, 2):
        save(root / f"checkpoint_{number}")
    path = str(root / "checkpoint_1")
    return path, lambda: directories.retire(str(root / "checkpoint_2"), 1, None)


def by_lightning(root):
    from penstock.integrations.lightning import PenstockIO

    io = PenstockIO()
    path = save(root / "epoch=1.ckpt")

    def drop():
        io.remove_checkpoint(path)
        io.wait()

    return path, drop


DOORS = [by_transformers, by_accelerate, by_lightning]


@pytest.mark.parametrize("by", DOORS)
def test_what_is_open_stays_and_goes_when_it_is_closed(tmp_path, by):
    path, drop = by(tmp_path)
    reading = OpenCheckpoint(path)
    with pytest.warns(PenstockWarning, match="at work there"):
        drop()
    try:
        # All of it can be read by its name.
        assert penstock.verify(path).ok
        assert Path(path, "logs/events").exists()
    finally:
        reading.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drop()
    assert not os.path.exists(path)


@pytest.mark.parametrize("by", DOORS)
def test_what_is_protected_stays(tmp_path, by):
    path, drop = by(tmp_path)
    Path(path, "protected").touch()
    with pytest.warns(PenstockWarning, match="protected"):
        drop()
    assert penstock.verify(path).ok


def test_the_last_one_gives_its_name_up_while_it_is_read(tmp_path):
    from penstock.integrations.lightning import directories

    saved, path = save(tmp_path / "last.penstock.ckpt"), save(tmp_path / "last.ckpt")
    reading = OpenCheckpoint(path)
    try:
        directories.rename_onto(saved, path)
        assert penstock.verify(path).ok
        left = [name for name in os.listdir(tmp_path) if name.endswith(".removed")]
        assert penstock.verify(tmp_path / left[0]).ok
    finally:
        reading.release()
    # The directory left behind is deleted with the next one.
    directories.remove(path, None)
    assert os.listdir(tmp_path) == []


def test_what_was_read_as_the_last_one_goes_with_the_next_save(tmp_path):
    """Also if Lightning deletes none, as with ``save_top_k=0``."""
    from penstock.integrations.lightning import directories

    path = save(tmp_path / "last.ckpt")
    reading = OpenCheckpoint(path)
    directories.rename_onto(save(tmp_path / "last.penstock.ckpt"), path)
    assert len(os.listdir(tmp_path)) == 2
    reading.release()
    directories.rename_onto(save(tmp_path / "last.penstock.ckpt"), path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert penstock.verify(path).ok


def test_what_accelerate_wrote_itself_keeps_what_is_read_in_it(tmp_path):
    from penstock.integrations.accelerate import directories

    for number in (1, 2):
        path = tmp_path / f"checkpoint_{number}"
        path.mkdir()
        for name in ("model.safetensors", "random_states_0.pkl"):
            (path / name).touch()
    path = tmp_path / "checkpoint_1"
    penstock.save(path / "ema", {"w": np.arange(30)})
    alone = SimpleNamespace(
        num_processes=1,
        scaler=None,
        **dict.fromkeys(("_dataloaders", "_custom_objects", "_schedulers", "_optimizers"), ()),
    )

    def retire():
        directories.retire(str(tmp_path / "checkpoint_2"), 1, alone)

    reading = OpenCheckpoint(str(path / "ema"))
    try:
        with pytest.warns(PenstockWarning, match="ema.*at work there"):
            retire()
        assert penstock.verify(path / "ema").ok
        assert sorted(os.listdir(path)) == ["ema", "model.safetensors", "random_states_0.pkl"]
    finally:
        reading.release()
    retire()
    assert os.listdir(tmp_path) == ["checkpoint_2"]


@pytest.mark.parametrize("end", ["", "/"])
def test_the_name_of_a_link_is_deleted_and_not_its_target(tmp_path, end):
    from penstock.integrations.directories import remove

    path = save(tmp_path / "kept")
    os.symlink(path, tmp_path / "link")
    remove(f"{tmp_path}/link{end}")
    assert os.listdir(tmp_path) == ["kept"]
    assert penstock.verify(path).ok


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_a_link_is_not_followed_by_separators(tmp_path, end):
    path = save(tmp_path / "kept")
    os.symlink(path, tmp_path / "link")
    with pytest.raises(StorageError) as refused:
        remove_checkpoint(f"{tmp_path}/link{end}")
    assert refused.value.errno == errno.ENOTDIR
    assert penstock.verify(path).ok


@pytest.mark.parametrize("end", ["logs/..", "logs/../", ".", "./"])
def test_a_path_that_ends_in_no_name_removes_nothing(tmp_path, monkeypatch, end):
    path = save(tmp_path / "ckpt")
    monkeypatch.chdir(path)
    for place in (end, os.path.join(path, end)):
        with pytest.raises(StorageError, match="does not end in a name") as refused:
            remove_checkpoint(place)
        assert refused.value.errno == errno.EINVAL
        assert penstock.verify(path).ok
        assert Path(path, "logs/events").exists()


def test_a_store_is_no_checkpoint_to_be_removed(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")
    store.save(1, {"w": np.arange(3)})
    with pytest.raises(StorageError, match=r"no checkpoint, and holds some.*step-") as no:
        remove_checkpoint(str(tmp_path / "store"))
    assert no.value.errno == errno.EINVAL
    assert store.verify(1).ok


def hooked(path):
    """Saves into the directory of a checkpoint, as a hook may: a checkpoint, and a store."""
    ema = os.path.join(path, "ema")
    penstock.save(ema, {"w": np.arange(30)})
    store = penstock.CheckpointStore(os.path.join(path, "best"))
    store.save(1, {"w": np.arange(30)})
    return ema, store


@pytest.mark.parametrize("by", DOORS)
def test_what_a_hook_has_saved_below_goes_with_it_and_only_if_it_may(tmp_path, by):
    path, drop = by(tmp_path)
    ema, store = hooked(path)

    def assert_kept(why, name):
        with pytest.warns(PenstockWarning, match=f"{name}.*{why}"):
            drop()
        assert penstock.verify(path).ok
        assert penstock.verify(ema).ok
        assert store.verify(1).ok

    store.protect(1)
    assert_kept("protected", "best/step-0000000001")
    store.unprotect(1)
    reading = OpenCheckpoint(ema)
    try:
        assert_kept("at work there", "ema")
    finally:
        reading.release()
    drop()
    assert not os.path.exists(path)


def test_links_within_are_removed_and_not_followed(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    path = save(tmp_path / "ckpt")
    os.symlink(other, os.path.join(path, "logs/link"))
    assert remove_checkpoint(path) > 400_000
    assert not os.path.exists(path)
    assert (other / "file").exists()


def test_directories_of_others_go_as_well(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/model.safetensors").write_bytes(b"123")
    assert remove_checkpoint(str(tmp_path / "theirs")) == 3
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_whoever_is_killed_while_deleting_leaves_no_half_that_looks_whole(tmp_path, calls):
    """It dies at one of the system calls that remove a name."""
    path = save(tmp_path / "ckpt")
    before = sorted(os.listdir(path))
    program = f"""
        import os, sys
        from penstock import _native
        from penstock.plugin import remove_checkpoint
        sys.stdout.write("ready"); sys.stdout.flush(); sys.stdin.read(1)
        remove_checkpoint({path!r})
    """
    strace = ["strace", "-f", "-q", "-o", "/dev/null", "-e", "trace=unlink,unlinkat,rmdir",
              "-e", f"inject=unlink,unlinkat,rmdir:signal=KILL:when={calls}"]  # fmt: skip
    command = [*strace, sys.executable, "-c", textwrap.dedent(program)]
    try:
        process = subprocess.run(command, input="x", text=True, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no strace")
    assert process.returncode in (0, -signal.SIGKILL, 128 + signal.SIGKILL), process.stderr
    if os.path.exists(path):
        if os.path.exists(os.path.join(path, "manifest.json")):
            assert sorted(os.listdir(path)) == before
            assert penstock.verify(path).ok
        else:
            with pytest.raises(IncompleteCheckpointError):
                penstock.load(path)
        remove_checkpoint(path)
    assert not os.path.exists(path)
