"""Optimizers with state in files, when storage fails: a step is made, or none is."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from conftest import mounted
from offload.optim.training_of import (
    MEMORY_BYTES,
    assert_equal,
    assert_equal_states,
    parameters,
    set_gradients,
)
from penstock import offload
from penstock.errors import CorruptCheckpointError, StorageError

SHAPES = ((1024, 1024), (17,), (300, 1000))


def pair(directory: Path) -> tuple[list[Any], list[Any], Any, Any]:
    theirs, ours = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    other = torch.optim.AdamW(theirs, fused=True)
    optimizer = offload.AdamW(ours, directory=directory, memory_bytes=MEMORY_BYTES)
    return theirs, ours, other, optimizer


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "btrfs"])
def test_a_full_disk_is_an_error_before_anything_changes(
    tmp_path: Path, need_root: None, kind: str
) -> None:
    with mounted(kind, tmp_path / "disk", 256 << 20) as disk:
        theirs, ours, other, optimizer = pair(disk / "state")
        set_gradients(0, theirs, ours)
        other.step()
        optimizer.step()
        before = [one.detach().clone() for one in ours]
        state = optimizer.state_dict()
        _fill(disk / "ballast")
        set_gradients(1, theirs, ours)
        for _ in range(2):
            with pytest.raises(StorageError, match="free some, and try again") as raised:
                optimizer.step()
            assert raised.value.errno == errno.ENOSPC
            assert_equal(before, ours)
            assert_equal_states(other.state_dict(), optimizer.state_dict())
        (disk / "ballast").unlink()
        # Btrfs frees space with its next transaction.
        subprocess.run(["sync", "-f", disk], check=True)
        del state
        for step in range(1, 4):
            set_gradients(step, theirs, ours)
            other.step()
            optimizer.step()
        assert_equal(theirs, ours)
        assert_equal_states(other.state_dict(), optimizer.state_dict())
        optimizer.close()


def _fill(path: Path) -> None:
    """Fills a file system up to a page or two."""
    block = os.urandom(1 << 16)
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(block)
        os.fsync(file.fileno())


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_a_damaged_file_is_named_and_nothing_changes(tmp_path: Path, moment: str) -> None:
    theirs, ours, other, optimizer = pair(tmp_path)
    set_gradients(0, theirs, ours)
    other.step()
    optimizer.step()
    held = optimizer.state_dict()["state"][0][moment]
    before = [one.detach().clone() for one in ours]
    content = Path(held.file.path).read_bytes()
    at = held.offset + 4_000
    with open(held.file.path, "r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    set_gradients(1, theirs, ours)
    with pytest.raises(CorruptCheckpointError, match=f"0.{moment}") as raised:
        optimizer.step()
    assert raised.value.tensor == f"0.{moment}"
    with pytest.raises(CorruptCheckpointError):
        held.read()
    # The first window: no parameter has changed, so a retry works once the file is repaired.
    assert_equal(before, ours)
    with open(held.file.path, "r+b") as file:
        file.write(content)
    other.step()
    optimizer.step()
    assert_equal(theirs, ours)
    optimizer.close()


def test_a_step_that_failed_in_its_middle_is_not_gone_on_from(tmp_path: Path) -> None:
    shapes = ((4 << 20,),)
    ours = parameters(shapes=shapes)
    optimizer = offload.AdamW(ours, directory=tmp_path / "state", memory_bytes=6 << 20)
    set_gradients(0, ours)
    optimizer.step()
    kept = optimizer.state_dict()
    penstock.save(tmp_path / "checkpoint", {"model": ours, "optimizer": kept})
    before = ours[0].detach().clone()
    path = kept["state"][0]["exp_avg"].file.path
    # In the last window, and only there: the checkpoint's file is another name of it.
    content = Path(path).read_bytes()
    with open(path, "r+b") as file:
        file.seek(len(content) - 10)
        file.write(bytes([content[-10] ^ 1]))
    set_gradients(1, ours)
    with pytest.raises(CorruptCheckpointError):
        optimizer.step()
    assert not torch.equal(before, ours[0])
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(penstock.PenstockError, match="load the last checkpoint"):
            call()
    with open(path, "r+b") as file:
        file.write(content)
    loaded = penstock.load(tmp_path / "checkpoint")
    with torch.no_grad():
        ours[0].copy_(loaded["model"][0])
    optimizer.load_state_dict(loaded["optimizer"])
    optimizer.step()
    theirs = parameters(shapes=shapes)
    other = torch.optim.AdamW(theirs, fused=True)
    for step in range(2):
        set_gradients(step, theirs)
        other.step()
    assert_equal(theirs, ours)
    optimizer.close()


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    theirs, ours, _, optimizer = pair(tmp_path)
    set_gradients(0, theirs, ours)
    optimizer.step()
    held = optimizer.state_dict()["state"][0]["exp_avg"]
    os.unlink(held.file.path)
    with pytest.raises(StorageError):
        optimizer.step()
    optimizer.close()


def test_a_directory_that_is_gone_is_not_a_full_disk(tmp_path: Path) -> None:
    theirs, ours, _, optimizer = pair(tmp_path / "state")
    set_gradients(0, theirs, ours)
    shutil.rmtree(tmp_path / "state")
    before = [one.detach().clone() for one in ours]
    with pytest.raises(StorageError, match="was moved or removed") as raised:
        optimizer.step()
    assert "free some" not in str(raised.value)
    assert_equal(before, ours)
    optimizer.close()


@pytest.mark.parametrize("call", ["step", "load_state_dict"])
def test_what_cannot_be_committed_is_not_gone_on_from(tmp_path: Path, call: str) -> None:
    theirs, ours, other, optimizer = pair(tmp_path)
    set_gradients(0, theirs, ours)
    other.step()
    optimizer.step()
    state = optimizer.state_dict()
    before = [one.detach().clone() for one in ours]
    # A file in place of the directory prevents a new generation.
    generation = tmp_path / "rank-00000" / "generation"
    generation.rename(tmp_path / "aside")
    generation.touch()
    arguments = [state] if call == "load_state_dict" else []
    with pytest.raises(penstock.PenstockError):
        getattr(optimizer, call)(*arguments)
    generation.unlink()
    (tmp_path / "aside").rename(generation)
    # A retry would apply the step twice.
    with pytest.raises(penstock.PenstockError, match=r"not committed.*load the last checkpoint"):
        optimizer.step()
    with torch.no_grad():
        for one, value in zip(ours, before, strict=True):
            one.copy_(value)
    optimizer.load_state_dict(state)
    set_gradients(1, theirs, ours)
    other.step()
    optimizer.step()
    assert_equal(theirs, ours)
    assert_equal_states(other.state_dict(), optimizer.state_dict())
    optimizer.close()
