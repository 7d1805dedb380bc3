"""A file system in user space that makes no hard links: another directory, seen through it.

``python linkless.py DIRECTORY MOUNTPOINT ANSWER FREE``. ``ANSWER`` is the name of the error that a
link gets (``EPERM``, …). ``FREE`` is ``free`` where a rename without replacing works, and
``replacing`` where it is refused, as by most of these. It ends when it is unmounted.
"""

from __future__ import annotations

import errno
import os
import sys

from passthrough import Passthrough, Renaming


class Linkless(Passthrough):
    """A directory, without hard links."""

    def __init__(self, directory, answer, *, renames_new):
        super().__init__(directory)
        self._answer = answer
        self.renames_new = renames_new

    def link(self, target, source):
        raise OSError(self._answer, "no links")


if __name__ == "__main__":
    os.umask(0)
    files = Linkless(sys.argv[1], getattr(errno, sys.argv[3]), renames_new=sys.argv[4] == "free")
    Renaming(files, sys.argv[2], foreground=True, nothreads=True, fsname="linkless", dev=True)
