"""Delays and failures of background saves, for tests."""

from __future__ import annotations

import fcntl
import os
import textwrap
from contextlib import contextmanager
from pathlib import Path

import forks
import penstock

MIB = 1 << 20

SLOWLY = penstock.Options(queue_depth=1, io_threads=1, extent_bytes=MIB)
"""One request at a time: a save under way stays visible for long."""


@contextmanager
def held(store, step):
    """Holds saves of a step back until the block ends, or the yielded function is called."""
    directory = Path(store.path(step))
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY)

    def release():
        fcntl.flock(fd, fcntl.LOCK_UN)

    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield release
    finally:
        release()
        os.close(fd)


def in_the_way(store, step):
    """Makes any save of a step fail: a file takes the place of its directory."""
    path = Path(store.path(step))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"in the way")
    return path


def run_to_its_end(script, *arguments, popen=forks.WholePopen, **environment):
    return forks.run(
        ["-c", textwrap.dedent(script), *arguments], popen=popen, env=os.environ | environment
    )
