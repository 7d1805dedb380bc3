"""Renames, links and removes Lightning's checkpoints so that one is complete at any time.

Lightning gives a checkpoint one name, such as ``last.ckpt``, which may belong already to a file of
`torch.save`, a link or a directory. A directory cannot be renamed onto any of these, so the new
checkpoint is saved beside it, and the two are exchanged. A process killed in between leaves both.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from penstock.errors import PenstockError
from penstock.integrations import directories
from penstock.plugin import decode_local_path, describe, durable, is_checkpoint

SUFFIX = ".ckpt"
"""Suffix of the names of Lightning's checkpoints."""

_BESIDE = ".penstock" + SUFFIX
_REMOVED = ".removed"


def absolute(path: str | os.PathLike[str]) -> str:
    """An absolute path, which survives changes of the working directory."""
    return os.path.abspath(decode_local_path(os.fspath(path).removeprefix("file://")))


def place_for(path: str) -> str:
    """The path to save to before the rename to ``path``: beside it, if that name is taken."""
    is_taken = os.path.lexists(path) and (
        os.path.islink(path) or not os.path.isdir(path) or describe(path) is not None
    )
    return path.removesuffix(SUFFIX) + _BESIDE if is_taken else path


def rename_onto(saved: str, path: str) -> None:
    """Renames a complete checkpoint, and removes the old one of that name."""
    if saved == path:
        return
    # Between the two renames the checkpoint at `saved` is found under that name.
    _put_aside(path)
    os.rename(saved, path)
    durable.sync(os.path.dirname(path))
    _clear(os.path.dirname(path))


def remove(path: str, instead: str | None) -> None:
    """Deletes a checkpoint of any kind; does nothing if there is none.

    Links beside it that lead to it are changed to another checkpoint first.

    Args:
        path: The file, link or directory.
        instead: A complete checkpoint for these links; None if there is none.
    """
    if not os.path.lexists(path):
        return
    above = os.path.dirname(path)
    # Resolves links in the directory's path, but not the last component.
    real = os.path.join(os.path.realpath(above), os.path.basename(path))
    if instead is not None:
        for entry in os.scandir(above):
            if entry.is_symlink() and entry.path != path and os.path.realpath(entry.path) == real:
                link(instead, entry.path)
    if is_checkpoint(path) and not os.path.islink(path):
        # Kept under its name, where readers find its files.
        directories.remove(path)
    else:
        # Renamed first: a kill then leaves it under a name that is no checkpoint's.
        _put_aside(path)
        durable.sync(above)
    _clear(above)


def link(target: str, path: str) -> None:
    """Makes a link lead to a checkpoint; it leads to one at any time."""
    if os.path.abspath(target) == os.path.abspath(path) or not os.path.exists(target):
        return
    above = os.path.dirname(path)
    fresh = os.path.join(above, f".{uuid.uuid4().hex}.link")
    os.symlink(os.path.relpath(target, above), fresh)
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            _put_aside(path)
            os.rename(fresh, path)
            _clear(above)
        else:
            os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    durable.sync(above)


def _put_aside(path: str) -> None:
    """Frees a name: renames the old entry for the next `_clear`, or removes it at once."""
    above, name = os.path.split(path)
    aside = os.path.join(above, f".{name}.{uuid.uuid4().hex[:8]}{_REMOVED}")
    if not directories.renamed(path, aside):
        directories.remove(path)


def _clear(above: str) -> None:
    """Deletes renamed entries in a directory; those still being read stay for the next call."""
    for aside in Path(above).glob(f".*{_REMOVED}"):
        with contextlib.suppress(OSError, PenstockError):
            directories.remove(str(aside))
