"""Names of checkpoints on a file system, changed so that at each moment one is complete.

Lightning gives a checkpoint one name, ``last.ckpt``, which may belong to a file of `torch.save`, to
a link or to a directory already. A directory cannot be renamed onto any of these, so the new
checkpoint is saved beside it and the two change places. Who is killed between has both.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from penstock.checkpoint.loading.foreign import describe, is_checkpoint
from penstock.checkpoint.loading.opened import decode_local_path
from penstock.errors import PenstockError
from penstock.integrations import directories
from penstock.io import durable

SUFFIX = ".ckpt"
"""What the names of Lightning's checkpoints end with."""

_BESIDE = ".penstock" + SUFFIX
_REMOVED = ".removed"


def absolute(path: str | os.PathLike[str]) -> str:
    """A path that no change of the working directory moves.

    Raises:
        UnsupportedPathError: It is a URL, but of a file.
    """
    return os.path.abspath(decode_local_path(os.fspath(path).removeprefix("file://")))


def place_for(path: str) -> str:
    """Where to save what is to be called ``path``: beside it, if the name is another's."""
    is_taken = os.path.lexists(path) and (
        os.path.islink(path) or not os.path.isdir(path) or describe(path) is not None
    )
    return path.removesuffix(SUFFIX) + _BESIDE if is_taken else path


def rename_onto(saved: str, path: str) -> None:
    """Gives a complete checkpoint its name, and removes what has had it."""
    if saved == path:
        return
    # The checkpoint at `saved` counts as one while the name is nobody's.
    _put_aside(path)
    os.rename(saved, path)
    durable.sync(os.path.dirname(path))
    _clear(os.path.dirname(path))


def remove(path: str, instead: str | None) -> None:
    """Deletes a checkpoint, whatever it is; nothing happens where there is none.

    Links beside it that lead to it are turned to another one first.

    Args:
        path: The file, link or directory.
        instead: A complete checkpoint; None where there is none.
    """
    if not os.path.lexists(path):
        return
    above = os.path.dirname(path)
    # As a link is resolved, whatever links lead to the directory.
    real = os.path.join(os.path.realpath(above), os.path.basename(path))
    if instead is not None:
        for entry in os.scandir(above):
            if entry.is_symlink() and entry.path != path and os.path.realpath(entry.path) == real:
                link(instead, entry.path)
    if is_checkpoint(path) and not os.path.islink(path):
        # A reader finds its files under its name.
        directories.remove(path)
    else:
        # A kill leaves it under a name that is no checkpoint's.
        _put_aside(path)
        durable.sync(above)
    _clear(above)


def link(target: str, path: str) -> None:
    """Has a link lead to a checkpoint; at each moment it leads to one."""
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
    """Makes a name free: what it was goes with the next `_clear`, or at once."""
    above, name = os.path.split(path)
    aside = os.path.join(above, f".{name}.{uuid.uuid4().hex[:8]}{_REMOVED}")
    if not directories.renamed(path, aside):
        directories.remove(path)


def _clear(above: str) -> None:
    """Deletes what was put aside in a directory; of what somebody reads the next one does."""
    for aside in Path(above).glob(f".*{_REMOVED}"):
        with contextlib.suppress(OSError, PenstockError):
            directories.remove(str(aside))
