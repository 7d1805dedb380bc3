"""A file system in user space without hard links, which shows another directory.

``python linkless.py DIRECTORY MOUNTPOINT ANSWER FREE``. ``ANSWER`` is the error of a link
(``EPERM``, …). ``FREE`` is ``free`` if a rename without replacing works, and ``replacing`` if it is
refused, as by most such file systems. The program ends when it is unmounted.
"""

from __future__ import annotations

import errno
import os
import sys

from passthrough import Passthrough, Renaming


class Linkless(Passthrough):
    """A directory without hard links."""

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
