"""A file system in user space that shows another directory, as a base for servers of tests.

mfusepy calls the methods of `Passthrough` by their names, with paths that begin at the mount point.
"""

from __future__ import annotations

import errno
import os
from ctypes.util import find_library

# Version 2 of the library does not pass on the flags of a rename.
os.environ["FUSE_LIBRARY_PATH"] = find_library("fuse3") or "libfuse3.so.3"

import mfusepy

RENAME_NOREPLACE = 1


class Passthrough(mfusepy.Operations):
    """Shows a directory unchanged."""

    use_ns = True

    def __init__(self, directory):
        self._directory = directory

    def _at(self, path):
        return self._directory + path

    def getattr(self, path, fh=None):
        found = os.lstat(self._at(path)) if fh is None else os.fstat(fh)
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
        os.link(self._at(source), self._at(target))

    def rename(self, old, new):
        os.rename(self._at(old), self._at(new))

    def rename_new(self, old, new):
        """Renames without replacing. Requests are handled one by one, so the check cannot race."""
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
    """Handles one flag of a rename, which the library ignores.

    `renames_new` of the operations says whether they rename without replacing.
    """

    def rename_fuse_3(self, old, new, flags):
        names = (old.decode(), new.decode())
        if flags == 0:
            return self.operations.rename(*names)
        if flags == RENAME_NOREPLACE and self.operations.renames_new:
            return self.operations.rename_new(*names)
        return -errno.EINVAL
