"""Names of checkpoints on a file system, changed so that at each moment one is complete.

Lightning gives a checkpoint one name, ``last.ckpt``, which may belong to a file of `torch.save`, to
a link or to a directory already. A directory cannot be renamed onto any of these, so the new
checkpoint is saved beside it and the two change places. Who is killed between has both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from penstock.loading.foreign import describe
from penstock.loading.opened import decode_local_path
from penstock.saving import durable

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
    aside = _aside(path)
    # The checkpoint at `saved` counts as one while the name is nobody's.
    os.rename(path, aside)
    os.rename(saved, path)
    durable.sync(os.path.dirname(path))
    _delete(aside)


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
    # What a kill leaves has a name that is no checkpoint's.
    aside = _aside(path)
    os.rename(path, aside)
    durable.sync(above)
    _delete(aside)
    for left in Path(above).glob(f".*{_REMOVED}"):
        _delete(str(left))


def link(target: str, path: str) -> None:
    """Has a link lead to a checkpoint; at each moment it leads to one."""
    if os.path.abspath(target) == os.path.abspath(path) or not os.path.exists(target):
        return
    above = os.path.dirname(path)
    fresh = os.path.join(above, f".{uuid.uuid4().hex}.link")
    os.symlink(os.path.relpath(target, above), fresh)
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            aside = _aside(path)
            os.rename(path, aside)
            os.rename(fresh, path)
            _delete(aside)
        else:
            os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    durable.sync(above)


def _aside(path: str) -> str:
    above, name = os.path.split(path)
    return os.path.join(above, f".{name}.{uuid.uuid4().hex[:8]}{_REMOVED}")


def _delete(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
