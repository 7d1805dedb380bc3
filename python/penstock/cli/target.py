"""What a path on the command line means: a checkpoint, or a store of them."""

from __future__ import annotations

import os
from pathlib import Path

import penstock
from penstock import _native


def is_store(path: Path) -> bool:
    """Whether a directory is a store: it holds directories of steps and is no checkpoint."""
    if not path.is_dir() or os.path.exists(path / _native.MANIFEST):
        return False
    return any(
        _native.parse_step(entry.name) is not None and entry.is_dir() for entry in path.iterdir()
    )


def checkpoint_at(path: Path) -> tuple[Path, str | None]:
    """The checkpoint that a path stands for: itself, or a store's newest complete one.

    Returns:
        Its path, and a note where it is another one than was given.

    Raises:
        CheckpointNotFoundError: A store has no complete step.
    """
    if not is_store(path):
        return path, None
    store = penstock.CheckpointStore(path)
    newest = store.latest()
    if newest is None:
        raise penstock.CheckpointNotFoundError(
            f"{path}: none of the steps of this store is complete; "
            f"penstock ls {path} says what is wrong with each",
            path=str(path),
        )
    note = f"{path} is a store; this is its newest complete step, {newest}"
    return Path(store.path(newest)), note


def store_at(path: Path) -> penstock.CheckpointStore:
    """The store in a directory.

    Raises:
        CheckpointNotFoundError: There is no directory, or it is a checkpoint itself.
    """
    if not path.is_dir():
        raise penstock.CheckpointNotFoundError(
            f"{path}: there is no such directory; check the path", path=str(path)
        )
    if os.path.exists(path / _native.MANIFEST):
        raise penstock.CheckpointNotFoundError(
            f"{path}: this is a checkpoint, not a store of them; try penstock inspect {path}",
            path=str(path),
        )
    return penstock.CheckpointStore(path)
