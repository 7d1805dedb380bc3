"""Directories that frameworks name after steps: which there are, how one goes or gives its name up.

Each plug-in knows by itself which of them are complete; listing and deletion are the same for all.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from penstock.checkpoint.saving.removal import remove_checkpoint

if TYPE_CHECKING:
    import re


def numbered(root: str, name: re.Pattern[str]) -> list[tuple[int, str]]:
    """The entries of a directory whose names have a number, the lowest first; empty without one.

    Args:
        root: The directory.
        name: Matches whole names; its first group is the number.
    """
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [match for match in map(name.fullmatch, names) if match is not None]
    return sorted((int(match[1]), os.path.join(root, match[0])) for match in matches)


def remove(path: str, *, foreign: bool = False) -> None:
    """Deletes what has a name: a link but not its target, a file, or a directory as a checkpoint.

    Args:
        path: The name.
        foreign: Whether a directory may be a framework's own checkpoint, with others in it.

    Raises:
        PenstockError: As of `remove_checkpoint`.
        OSError: The operating system failed it.
    """
    # With a separator behind it, the name of a link is that of its target.
    path = path.rstrip(os.sep) or path
    if os.path.isdir(path) and not os.path.islink(path):
        remove_checkpoint(path, foreign=foreign)
    else:
        os.unlink(path)


def renamed(path: str, to: str) -> bool:
    """Renames something; False for a directory in a lower layer of overlayfs, which stays.

    Raises:
        OSError: The operating system failed it.
    """
    try:
        os.rename(path, to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True
