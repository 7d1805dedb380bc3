"""`Lock`: that a directory is used by one process, and there only once."""

from __future__ import annotations

import errno
import fcntl
import os

from penstock.errors import StorageError

_NAME = "lock"
_held: set[tuple[int, int]] = set()
"""Directories that this process has locked, by device and inode: its own locks let it in."""


class Lock:
    """A directory, locked.

    Children of the process do not have the lock, unlike that of `flock`: what outlives a training
    that was killed is often a worker of its data loader.

    Args:
        directory: It is there.

    Attributes:
        path: The file that is locked.
        is_released: Whether it is not any more.

    Raises:
        StorageError: It is locked already.
        OSError: The system refuses it.
    """

    def __init__(self, directory: str) -> None:
        stat = os.stat(directory)
        self._key = (stat.st_dev, stat.st_ino)
        self._process = os.getpid()
        self.path = os.path.join(directory, _NAME)
        self.is_released = True
        # Asked before the file is opened: to close it would release the lock that there is.
        if self._key in _held:
            raise _in_use(directory, "another optimizer of this process: close() that one")
        self._file = open(self.path, "wb")  # noqa: SIM115
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise _in_use(directory, "another process: give each a directory") from None
        except OSError:
            self._file.close()
            raise
        _held.add(self._key)
        self.is_released = False

    def check_place(self, directory: str) -> None:
        """Looks whether a path still leads to the directory that is locked.

        Raises:
            StorageError: It does not.
        """
        try:
            stat = os.stat(directory)
            is_there = (stat.st_dev, stat.st_ino) == self._key
        except OSError:
            is_there = False
        if not is_there:
            raise StorageError(
                f"{directory} was moved or removed since the optimizer was made: move it back;"
                " nothing has been changed",
                path=directory,
                errno=errno.ENOENT,
            )

    def release(self) -> None:
        """Lets others have it."""
        if not self.is_released and os.getpid() == self._process:
            self.is_released = True
            _held.discard(self._key)
            self._file.close()

    def __del__(self) -> None:
        self.release()


def _in_use(directory: str, by: str) -> StorageError:
    return StorageError(f"{directory} is in use by {by}", path=directory, errno=None)
