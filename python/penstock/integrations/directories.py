"""Directories that frameworks name by step: lists, removes and renames them.

Each plug-in decides which of them are complete; listing and deleting are the same for all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from typing import TYPE_CHECKING

from penstock.errors import CannotSealError
from penstock.plugin import remove_checkpoint

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator

_MEMORY = "/dev/shm"
"""A file system in memory."""


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


@contextlib.contextmanager
def private_directory(*, is_sealed: bool) -> Iterator[str]:
    """A temporary directory that no other user reads, and that is removed afterwards.

    Frameworks hand some small files over by their paths. In a sealed save such files must not reach
    a disk, so the directory is in memory then.

    Args:
        is_sealed: Whether its files belong to a sealed checkpoint.

    Raises:
        CannotSealError: There is no file system in memory; nothing was written.
    """
    if is_sealed and not (os.path.ismount(_MEMORY) and os.access(_MEMORY, os.W_OK | os.X_OK)):
        raise CannotSealError(
            f"{_MEMORY} is no file system in memory that can be written: small files of a sealed "
            "checkpoint pass through one; mount one there, or save without sealing=",
            path=_MEMORY,
        )
    # Made by `mkdtemp`, so only its owner enters it.
    with tempfile.TemporaryDirectory(prefix="penstock-", dir=_MEMORY if is_sealed else None) as one:
        yield one
