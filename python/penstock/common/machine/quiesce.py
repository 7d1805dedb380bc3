"""Waits for idle devices, so that a measurement does not pay for the previous one."""

from __future__ import annotations

import os
import time
from pathlib import Path

_QUIET_SECONDS = 0.3
_SECONDS_MAX = 3.0
_BYTES_PER_SECOND = 0.5e9


def quiesce(directory: Path, *, seconds_max: float = 30.0) -> None:
    """Waits until the device of a directory has finished earlier work.

    If a file system discards blocks, the device continues to trim deleted files for a while, which
    would slow down the next measurement.

    Args:
        directory: A directory on the device.
        seconds_max: Longest wait after the sync of all dirty data: others may keep the device busy.
    """
    os.sync()
    device = directory.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not stat.exists():
        return
    deadline = time.monotonic() + seconds_max
    before = None
    while (left := deadline - time.monotonic()) > 0:
        now = stat.read_text()
        if now == before:
            return
        before = now
        time.sleep(min(_QUIET_SECONDS, left))


def quiesce_after(directory: Path, nbytes: int) -> None:
    """Waits like `quiesce` after this many bytes were written or deleted, in proportion to them.

    A device that others use never becomes idle, so this waits at most three seconds after the sync.
    """
    quiesce(directory, seconds_max=min(_SECONDS_MAX, nbytes / _BYTES_PER_SECOND))
