"""A file system in user space with failing operations, which shows another directory.

``python failing_files.py DIRECTORY MOUNTPOINT``. Each line on standard input is a `Fault` as JSON,
or null for none; the answer is a line with the operations since the previous line, and the number
of them that failed. The program ends when it is unmounted.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from typing import NamedTuple

from passthrough import Passthrough, Renaming


class Fault(NamedTuple):
    """An error, or another fault, of some operations.

    Attributes:
        operation: Name of the method here.
        kind: Name of an error; ``short`` for half of the requested bytes; ``flipped`` for a flipped
            bit in a read; ``lost`` for a failed sync that drops its data.
        skip: Number of operations of that name that succeed first.
        name: Part of the paths of affected files.
    """

    operation: str
    kind: str
    skip: int = 0
    count: int = 1
    name: str = ""


_PAGE_BYTES = 1 << 12
"""A short transfer ends at a page boundary, where direct I/O can resume."""


def _half(nbytes):
    return nbytes // 2 // _PAGE_BYTES * _PAGE_BYTES or nbytes


class Failing(Passthrough):
    """A directory, with faults."""

    renames_new = True

    def __init__(self, directory):
        super().__init__(directory)
        self._fault = None
        self._seen = 0
        self._failed = 0
        self._counts = {}
        self._unsynced = {}
        self._lock = threading.Lock()

    def init_with_config(self, connection, config):
        # In a page cache a short read is the end of the file, and the kernel pads it with zeros.
        config.direct_io = 1
        config.use_ino = 1
        config.hard_remove = 1
        for name in ("attr_timeout", "entry_timeout", "negative_timeout"):
            setattr(config, name, 0.0)

    def set(self, fault):
        """Sets another fault; returns the operations under the previous one."""
        with self._lock:
            done = {"counts": self._counts, "failed": self._failed}
            self._fault, self._seen, self._failed, self._counts = fault, 0, 0, {}
        return done

    def _kind(self, operation, *paths):
        """Returns the kind of fault of an operation; raises it if it is an error."""
        with self._lock:
            self._counts[operation] = self._counts.get(operation, 0) + 1
            fault = self._fault
            if fault is None or fault.operation != operation:
                return None
            if not any(fault.name in path for path in paths if path is not None):
                return None
            self._seen += 1
            if not fault.skip < self._seen <= fault.skip + fault.count:
                return None
            self._failed += 1
        if fault.kind in ("short", "flipped", "lost"):
            return fault.kind
        raise OSError(getattr(errno, fault.kind), "a fault")

    def read(self, path, size, offset, fh):
        kind = self._kind("read", path)
        if kind == "short":
            return super().read(path, _half(size), offset, fh)
        found = super().read(path, size, offset, fh)
        if kind == "flipped" and found:
            middle = len(found) // 2
            found = found[:middle] + bytes([found[middle] ^ 1]) + found[middle + 1 :]
        return found

    def write(self, path, data, offset, fh):
        if self._kind("write", path) == "short":
            data = data[: _half(len(data))]
        number = os.fstat(fh).st_ino
        self._unsynced.setdefault(number, []).append((offset, len(data)))
        return super().write(path, data, offset, fh)

    def fsync(self, path, datasync, fh):
        kind = self._kind("fsync", path)
        unsynced = self._unsynced.pop(os.fstat(fh).st_ino, [])
        if kind == "lost":
            # Like a kernel that has dropped pages which it could not write.
            with open(f"/proc/self/fd/{fh}", "r+b") as file:
                for offset, nbytes in unsynced:
                    file.seek(offset)
                    file.write(bytes(nbytes))
            raise OSError(errno.EIO, "a fault")

    def fsyncdir(self, path, datasync, fh):
        self._kind("fsyncdir", path)

    def fallocate(self, path, mode, offset, size, fh):
        self._kind("fallocate", path)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "not this mode")
        os.posix_fallocate(fh, offset, size)

    def open(self, path, flags):
        self._kind("open", path)
        return super().open(path, flags)

    def create(self, path, mode, fi=None):
        self._kind("create", path)
        return super().create(path, mode, fi)

    def link(self, target, source):
        self._kind("link", target, source)
        super().link(target, source)

    def rename(self, old, new):
        self._kind("rename", old, new)
        super().rename(old, new)

    def truncate(self, path, length, fh=None):
        self._kind("truncate", path)
        super().truncate(path, length, fh)

    def unlink(self, path):
        self._kind("unlink", path)
        super().unlink(path)

    def mkdir(self, path, mode):
        self._kind("mkdir", path)
        super().mkdir(path, mode)

    def rmdir(self, path):
        self._kind("rmdir", path)
        super().rmdir(path)

    def readdir(self, path, fh):
        self._kind("readdir", path)
        # If the file system numbers its inodes, an entry without a number is invalid.
        return [
            (name, {"st_ino": os.lstat(f"{self._at(path)}/{name}").st_ino}, 0)
            for name in super().readdir(path, fh)
        ]


def _listen(files):
    for line in sys.stdin:
        told = json.loads(line)
        done = files.set(None if told is None else Fault(**told))
        sys.stdout.write(json.dumps(done) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    os.umask(0)
    failing = Failing(sys.argv[1])
    threading.Thread(target=_listen, args=(failing,), daemon=True).start()
    Renaming(failing, sys.argv[2], foreground=True, nothreads=True, fsname="failing", dev=True)
