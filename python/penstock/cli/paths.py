"""Resolves a path on the command line to a checkpoint or a store."""

from __future__ import annotations

import os
import stat

import penstock
from penstock import _native
from penstock.checkpoint.loading import path_kind
from penstock.common.file_names import step_of
from penstock.common.found import is_directory, is_there

_WHAT = {
    stat.S_IFREG: "a file",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def is_store(path: str) -> bool:
    """Whether a directory is a store: it holds directories of steps and is no checkpoint."""
    if not is_directory(path) or is_there(os.path.join(path, _native.MANIFEST)):
        return False
    return any(
        step_of(name) is not None and is_directory(os.path.join(path, name))
        for name in _native.list_names(path)
    )


def check_directory(path: str) -> None:
    """Raises, with a description of the path, unless it is a directory that can be read."""
    found = _native.stat(path)
    if found is None:
        what = "a link that leads nowhere" if os.path.islink(path) else None
    elif found[0] == "directory":
        _native.list_names(path)
        return
    else:
        what = _WHAT.get(stat.S_IFMT(os.stat(path).st_mode), "no directory")
    if what is None:
        text = ": there is no such directory; check the path"
    else:
        # For a file of another format, says what reads it.
        told = path_kind.describe(path)
        what_else = f": this is {what}, and checkpoints and stores are directories"
        text = what_else if told is None else f" {told}"
    raise penstock.errors.CheckpointNotFoundError(f"{path}{text}", path=path)


def checkpoint_at(path: str) -> tuple[str, str | None]:
    """The checkpoint at a path: the path itself, or a store's newest complete step.

    Returns:
        The checkpoint's path, and a note if it is not the given one.
    """
    check_directory(path)
    if not is_store(path):
        return path, None
    store = penstock.CheckpointStore(path)
    newest = store.latest()
    if newest is None:
        raise penstock.errors.CheckpointNotFoundError(
            f"{path}: none of the steps of this store is complete; "
            f"penstock ls {path} says what is wrong with each",
            path=path,
        )
    note = f"{path} is a store; this is its newest complete step, {newest}"
    return store.path(newest), note


def store_at(path: str) -> penstock.CheckpointStore:
    """The store in a directory."""
    check_directory(path)
    if is_there(os.path.join(path, _native.MANIFEST)):
        raise penstock.errors.CheckpointNotFoundError(
            f"{path}: this is a checkpoint, not a store of them; try penstock inspect {path}",
            path=path,
        )
    return penstock.CheckpointStore(path)
