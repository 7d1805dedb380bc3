"""Plug-ins delete as a store does: nothing from under a reader, and nothing half."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.checkpoint.loading.opened import OpenCheckpoint
from penstock.checkpoint.saving.removal import remove_checkpoint


def save(path):
    """A checkpoint with what a framework puts beside it."""
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
    with pytest.warns(penstock.PenstockWarning, match="at work there"):
        drop()
    try:
        # All of it is there to be read, by its name.
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
    with pytest.warns(penstock.PenstockWarning, match="protected"):
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
    # The one that was left goes with the next.
    directories.remove(path, None)
    assert os.listdir(tmp_path) == []


def test_a_link_and_what_it_leads_to_are_left_alone(tmp_path):
    path = save(tmp_path / "kept")
    os.symlink(path, tmp_path / "link")
    with pytest.raises(penstock.StorageError) as refused:
        remove_checkpoint(str(tmp_path / "link"))
    assert refused.value.errno == errno.ENOTDIR
    assert penstock.verify(path).ok


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
        from penstock.checkpoint.saving.removal import remove_checkpoint
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
            with pytest.raises(penstock.IncompleteCheckpointError):
                penstock.load(path)
        remove_checkpoint(path)
    assert not os.path.exists(path)
