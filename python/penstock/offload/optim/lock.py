"""`Lock`: locks a directory for one user in one process."""

from __future__ import annotations

import errno
import fcntl
import os

from penstock.errors import StorageError

_NAME = "lock"
_held: set[tuple[int, int]] = set()
"""Directories that this process has locked, by device and inode: POSIX would let it in again."""


class Lock:
    """A locked directory.

    Child processes do not hold the lock, unlike that of `flock`: a data loader's worker often
    outlives a training process that was killed.

    Args:
        directory: An existing directory.

    Attributes:
        path: The lock file.
        is_released: Whether the lock was released.

    Raises:
        StorageError: The directory is locked already.
        OSError: The system refuses it.
    """

    def __init__(self, directory: str) -> None:
        stat = os.stat(directory)
        self._key = (stat.st_dev, stat.st_ino)
        self._process = os.getpid()
        self.path = os.path.join(directory, _NAME)
        self.is_released = True
        # Checked before the file is opened, as closing it would release the lock held already.
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
        """Raises `StorageError` if the path no longer leads to the locked directory."""
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
        """Releases the lock."""
        if not self.is_released and os.getpid() == self._process:
            self.is_released = True
            _held.discard(self._key)
            self._file.close()

    def __del__(self) -> None:
        self.release()


def _in_use(directory: str, by: str) -> StorageError:
    return StorageError(f"{directory} is in use by {by}", path=directory, errno=None)
