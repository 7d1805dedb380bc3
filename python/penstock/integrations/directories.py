"""Directories that frameworks name by step: lists, removes and renames them.

Each plug-in decides which of them are complete; listing and deleting are the same for all.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from penstock.plugin import remove_checkpoint

if TYPE_CHECKING:
    import re


def numbered(root: str, name: re.Pattern[str]) -> list[tuple[int, str]]:
    """The entries of a directory whose names have a number, by number; empty without a directory.

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
    """Deletes a link (not its target), a file, or a directory as a checkpoint.

    Args:
        path: Its path.
        foreign: Whether a directory may be a framework's own checkpoint, which contains others.

    Raises:
        PenstockError: As for `remove_checkpoint`.
        OSError: The operating system failed it.
    """
    # With a trailing separator the path of a link means its target.
    path = path.rstrip(os.sep) or path
    if os.path.isdir(path) and not os.path.islink(path):
        remove_checkpoint(path, foreign=foreign)
    else:
        os.unlink(path)


def renamed(path: str, to: str) -> bool:
    """Renames a file or directory; returns False for a directory in a lower layer of overlayfs.

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
