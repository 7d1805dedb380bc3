"""Megatron-LM's tracker file, and its deletion of old iterations.

`megatron.training.checkpointing` writes ``latest_checkpointed_iteration.txt`` in place, and deletes
directories by `shutil.rmtree`. The module is not part of every wheel of Megatron-Core, and a
program imports it when it likes: so its names are replaced in the first save or load after that.

- The tracker is replaced in one durable step, and never names an iteration that is not complete.
- A directory is deleted by `penstock.plugin.remove_checkpoint`: not while it is loaded or saved,
  and not if it is protected.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import sys
import threading
import warnings
from functools import wraps
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.dcp_files import METADATA
from penstock.errors import (
    IncompleteCheckpointError,
    PenstockWarning,
    ProtectedCheckpointError,
    StorageError,
)
from penstock.integrations.dcp import directory
from penstock.plugin import durable, is_checkpoint, remove_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = "megatron.training.checkpointing"
TRACKER = "latest_checkpointed_iteration.txt"

_OF_PENSTOCK = re.compile(r"(shard|part)-\d.*|(beside|manifest)\.[0-9a-f]{32}\..*")
"""Files of an attempt to save, whether it was committed or not."""

_BESIDE = {"metadata.json", "common.pt", METADATA}
"""Files beside the data: those of Megatron-Core, and the mark of a deleted checkpoint."""

_CLEANUP = "cleanup_old_non_persistent_checkpoint"

_lock = threading.Lock()
_before: dict[str, Any] = {}
"""The replaced names of the module."""


def patch() -> None:
    """Replaces the names, if the module is imported and this has not been done."""
    module = sys.modules.get(MODULE)
    # A module that is being imported lacks them still.
    if module is None or _before or not hasattr(module, "save_checkpoint"):
        return
    with _lock:
        found = vars(module)
        replaced: dict[str, Any] = {}
        if found.get("shutil") is shutil:
            replaced["shutil"] = _Substitute(shutil, rmtree=_rmtree)
        # Before 0.19 a function opens files, and then an object that stands for `open` and `os`.
        if callable(found.get("open_file")):
            replaced["open_file"] = _opening(found["open_file"])
        elif hasattr(found.get("maybe_msc"), "open"):
            files = found["maybe_msc"]
            replaced["maybe_msc"] = _Substitute(files, open=_opening(files.open))
        if len(replaced) < 2:
            missing = "shutil" if "shutil" not in replaced else "open_file and maybe_msc"
            warnings.warn(
                f"{MODULE} has no {missing}: Megatron-LM writes its tracker file or deletes old "
                "iterations without Penstock; do not load an iteration while it is deleted",
                PenstockWarning,
                stacklevel=2,
            )
        if callable(found.get(_CLEANUP)):
            replaced[_CLEANUP] = _going_on(found[_CLEANUP])
        for name, ours in replaced.items():
            _before[name] = found[name]
            setattr(module, name, ours)


def take_back() -> None:
    """Gives the module its names again."""
    with _lock:
        while _before:
            name, value = _before.popitem()
            setattr(sys.modules[MODULE], name, value)


class _Substitute:
    """A module or object with some of its attributes replaced."""

    def __init__(self, of: Any, **replaced: Callable[..., Any]) -> None:
        self._of = of
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def _rmtree(path: str | os.PathLike[str], *positional: Any, **named: Any) -> None:
    """Deletes a directory: if it is on a file system, not while it is in use."""
    where = os.fspath(path)
    if os.path.isdir(where) and not os.path.islink(where):
        remove_checkpoint(where, foreign=True)
    else:
        shutil.rmtree(path, *positional, **named)


def _going_on(cleanup: Callable[..., None]) -> Callable[..., None]:
    """Keeps a checkpoint that is in use or protected, which would end the training.

    The next cleanup looks at it again.
    """

    @wraps(cleanup)
    def keeping(*positional: Any, **named: Any) -> None:
        try:
            cleanup(*positional, **named)
        except (ProtectedCheckpointError, StorageError) as error:
            if isinstance(error, StorageError) and error.errno != errno.EBUSY:
                raise
            warnings.warn(f"it is kept: {error}", PenstockWarning, stacklevel=2)

    return keeping


def _opening(open_file: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(open_file)
    def opened(path: Any, mode: str = "r", *positional: Any, **named: Any) -> Any:
        where = os.fspath(path)
        # At a URL it is a file of the storage client.
        is_ours = os.path.basename(where) == TRACKER and os.path.isdir(
            os.path.dirname(where) or "."
        )
        if mode == "w" and is_ours:
            return _Tracker(where)
        return open_file(path, mode, *positional, **named)

    return opened


class _Tracker(io.StringIO):
    """The tracker file while it is written; `close` replaces the old one.

    A block that raises leaves the old one.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:
            super().close()
        super().__exit__(kind, *error)

    def close(self) -> None:
        if not self.closed:
            text = self.getvalue()
            super().close()
            _replace(self._path, text)


def _replace(path: str, text: str) -> None:
    if text.strip().isdecimal():
        _check_complete(os.path.join(os.path.dirname(path), f"iter_{int(text):07d}"), path)
    try:
        durable.replace(path, text.encode())
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; it still names the iteration before: "
            "make room there",
            path=path,
            errno=error.errno,
        ) from error


def _check_complete(checkpoint: str, tracker: str) -> None:
    """Refuses to name a directory that is missing, or holds only an unfinished save.

    A directory of a format that is neither Penstock's nor DCP's is Megatron-LM's affair.
    """
    if is_checkpoint(checkpoint) or directory.holds_dcp(checkpoint):
        return
    try:
        names = os.listdir(checkpoint)
    except FileNotFoundError:
        names = []
    if any(map(_OF_PENSTOCK.fullmatch, names)) or _BESIDE.issuperset(names):
        raise IncompleteCheckpointError(
            f"{tracker} would name {checkpoint}, which is no complete checkpoint: it still names "
            "the iteration before; save again",
            path=checkpoint,
        )
