"""A file system in user space that makes no hard links: another directory, seen through it.

``python linkless.py DIRECTORY MOUNTPOINT ANSWER FREE``. ``ANSWER`` is the name of the error that a
link gets (``EPERM``, …). ``FREE`` is ``free`` where a rename without replacing works, and
``replacing`` where it is refused, as by most of these. It ends when it is unmounted.
"""

from __future__ import annotations

import errno
import os
import sys
from ctypes.util import find_library

# Version 2 of the library has no flags of a rename.
os.environ["FUSE_LIBRARY_PATH"] = find_library("fuse3") or "libfuse3.so.3"

import mfusepy

RENAME_NOREPLACE = 1


class Linkless(mfusepy.Operations):
    """A directory, without hard links."""

    use_ns = True

    def __init__(self, directory, answer):
        self._directory = directory
        self._answer = answer

    def _at(self, path):
        return self._directory + path

    def getattr(self, path, fh=None):
        found = os.lstat(self._at(path))
        names = ("mode", "nlink", "uid", "gid", "size", "blocks", "ino")
        times = ("atime", "mtime", "ctime")
        return {f"st_{name}": getattr(found, f"st_{name}") for name in names} | {
            f"st_{name}": getattr(found, f"st_{name}_ns") for name in times
        }

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path):
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    def link(self, target, source):
        raise OSError(self._answer, "no links")

    def rename(self, old, new):
        os.rename(self._at(old), self._at(new))

    def rename_new(self, old, new):
        """Requests come one after the other: nobody takes the name in between."""
        if os.path.lexists(self._at(new)):
            raise FileExistsError(errno.EEXIST, "taken")
        self.rename(old, new)

    def open(self, path, flags):
        return os.open(self._at(path), flags & ~(os.O_CREAT | os.O_EXCL | os.O_DIRECT))

    def create(self, path, mode, fi=None):
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def truncate(self, path, length, fh=None):
        os.truncate(self._at(path), length)

    def fsync(self, path, datasync, fh):
        os.fsync(fh)

    def release(self, path, fh):
        os.close(fh)

    def unlink(self, path):
        os.unlink(self._at(path))

    def mkdir(self, path, mode):
        os.mkdir(self._at(path), mode)

    def rmdir(self, path):
        os.rmdir(self._at(path))

    def symlink(self, target, source):
        os.symlink(source, self._at(target))

    def readlink(self, path):
        return os.readlink(self._at(path))

    def chmod(self, path, mode):
        os.chmod(self._at(path), mode)

    def utimens(self, path, times=None):
        os.utime(self._at(path), ns=times)


class Renaming(mfusepy.FUSE):
    """Knows one flag of a rename, which the library passes over."""

    def rename_fuse_3(self, old, new, flags):
        names = (old.decode(), new.decode())
        if flags == 0:
            return self.operations.rename(*names)
        if flags == RENAME_NOREPLACE and sys.argv[4] == "free":
            return self.operations.rename_new(*names)
        return -errno.EINVAL


if __name__ == "__main__":
    os.umask(0)
    files = Linkless(sys.argv[1], getattr(errno, sys.argv[3]))
    Renaming(files, sys.argv[2], foreground=True, nothreads=True, fsname="linkless", dev=True)
