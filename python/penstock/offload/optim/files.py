"""`StateFiles`: the files of one rank's optimizer state, reused once nobody needs them.

A file is written once, and not changed while anything holds it: a generation, a ``state_dict``, or
a save that has not yet linked it into its checkpoint. Afterwards a later generation writes over it;
but if it has a link elsewhere, as in a checkpoint, only the link here is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
import weakref
from pathlib import Path

from penstock.common.machine.facts import mount_of
from penstock.errors import PenstockError, StorageError, storage_errors
from penstock.io.digested_file import ReservedFile

_SUFFIX = ".safetensors"
_PROBE = "probe"
_LOCK = "lock"
_BESIDE_BYTES = 1 << 20
"""Free space needed beside the files: for links of a generation; digests need a hundredth more."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Answers of file systems without hard links."""
_COPIES_ON_WRITE = ("btrfs", "bcachefs", "zfs")
"""File systems on which even overwriting takes new space."""


_rooms: weakref.WeakSet[ReservedFile] = weakref.WeakSet()
"""Files of this process, which may outlive the optimizer that made them."""


class StateFiles:
    """The directory of one rank's state.

    It is created with its parents. Files that another process has left there and that belong to no
    generation are removed.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.generation = os.path.join(directory, "generation")
        self._process = os.getpid()
        self._drawn = uuid.uuid4().hex[:8]
        self._next = 0
        self._spares: dict[int, list[str]] = {}
        with storage_errors("use", directory):
            os.makedirs(directory, exist_ok=True)
            self._lock = Lock(directory)
        try:
            self._clear()
            self._check_links()
            kind = mount_of(Path(directory).resolve())["file_system"]
        except BaseException:
            self._lock.release()
            raise
        self._copies_on_write = kind in _COPIES_ON_WRITE

    def _clear(self) -> None:
        """Removes files that nothing holds."""
        held = {room.path for room in _rooms}
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            if (name.endswith(_SUFFIX) and path not in held) or name == _PROBE:
                os.unlink(path)

    def _check_links(self) -> None:
        probe = os.path.join(self.directory, _PROBE)
        try:
            os.link(self._lock.path, probe)
            names = os.stat(probe).st_nlink
            os.unlink(probe)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise _failed("link", self._lock.path, error) from error
            raise StorageError(
                f"{self.directory}: its file system makes no hard links ({error.strerror}), which"
                " generations of the state are made of: choose a directory on another one",
                path=self.directory,
                errno=error.errno,
            ) from error
        # As on sshfs, where files linked into a checkpoint would be taken for unused ones.
        if names != 2:
            raise StorageError(
                f"{self.directory}: its file system does not tell how many hard links a file has,"
                " so those of checkpoints would be written over: choose a directory on another one",
                path=self.directory,
                errno=None,
            )

    def check_open(self) -> None:
        """Raises `PenstockError` if the directory is no longer in use by this optimizer."""
        if self._lock.is_released:
            raise PenstockError(f"the optimizer of {self.directory} is closed: make another one")

    def check_room(self, nbytes: int) -> None:
        """Raises `StorageError` unless there is room for bytes that cannot be reserved."""
        self._lock.check_place(self.directory)
        with storage_errors("use", self.directory):
            stats = os.statvfs(self.directory)
        free = stats.f_bavail * stats.f_frsize
        wanted = _BESIDE_BYTES + nbytes // 100 + (nbytes if self._copies_on_write else 0)
        if free < wanted:
            raise StorageError(
                f"{self.directory}: {free} bytes are free, this takes {wanted}: free some, and try"
                " again: nothing has been changed",
                path=self.directory,
                errno=errno.ENOSPC,
            )

    def take(self, nbytes: int) -> ReservedFile:
        """A file of that size to write, reused or new."""
        self._check_process()
        if spares := self._spares.get(nbytes):
            return self._room(spares.pop(), nbytes)
        self._drop_spares()
        path = self._new_path()
        try:
            with open(path, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            if error.errno not in _FULL:
                raise _failed("make", path, error) from error
            raise StorageError(
                f"{self.directory}: no room for {nbytes} bytes more of the state"
                f" ({error.strerror}): free some, and try again: nothing has been changed",
                path=path,
                errno=error.errno,
            ) from error
        return self._room(path, nbytes)

    def link(self, path: str, nbytes: int) -> ReservedFile | None:
        """Links a file of a generation here again; it is not reused while it has other links.

        Returns:
            The file; None if it cannot be linked.
        """
        self._check_process()
        own = self._new_path()
        try:
            os.link(path, own)
        except OSError:
            return None
        return self._room(own, nbytes)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise PenstockError(
                f"{self.directory} is used by process {self._process}, which this one was forked"
                " from: make another optimizer here, with a directory of its own"
            )

    def _new_path(self) -> str:
        path = os.path.join(self.directory, f"{self._drawn}-{self._next:08}{_SUFFIX}")
        self._next += 1
        return path

    def _room(self, path: str, nbytes: int) -> ReservedFile:
        room = ReservedFile(path, nbytes)
        _rooms.add(room)
        weakref.finalize(room, self._give_back, path, nbytes).atexit = False
        return room

    def _give_back(self, path: str, nbytes: int) -> None:
        """Frees a file that nothing holds: for reuse, or by removing it if it has other links."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(OSError):
            if not self._lock.is_released and os.stat(path).st_nlink == 1:
                self._spares.setdefault(nbytes, []).append(path)
            else:
                os.unlink(path)

    def _drop_spares(self) -> None:
        """Removes unused files, which have other sizes than the requested one."""
        spares, self._spares = self._spares, {}
        for path in [path for paths in spares.values() for path in paths]:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def close(self) -> None:
        """Unlocks the directory for others; the last generation stays."""
        if not self._lock.is_released and os.getpid() == self._process:
            self._drop_spares()
            self._lock.release()


def _failed(what: str, path: str, error: OSError) -> StorageError:
    return StorageError(f"cannot {what} {path}: {error.strerror}", path=path, errno=error.errno)


_held: set[tuple[int, int]] = set()
"""Directories that this process has locked, by device and inode: POSIX would let it in again."""


class Lock:
    """A locked directory.

    Child processes do not hold the lock, unlike that of `flock`: a data loader's worker often
    outlives a training process that was killed.

    Attributes:
        path: The lock file.
        is_released: Whether the lock was released.
    """

    def __init__(self, directory: str) -> None:
        stat = os.stat(directory)
        self._key = (stat.st_dev, stat.st_ino)
        self._process = os.getpid()
        self.path = os.path.join(directory, _LOCK)
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
