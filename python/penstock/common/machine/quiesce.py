"""A device at rest: what one measurement leaves behind is nothing that the next one pays for."""

from __future__ import annotations

import os
import time
from pathlib import Path

_QUIET_SECONDS = 0.3
_SECONDS_MAX = 3.0
_BYTES_PER_SECOND = 0.5e9


def settle(directory: Path, *, seconds_max: float = 30.0) -> None:
    """Waits until the device under a directory has nothing left to do from what came before.

    Where a file system discards, the device goes on trimming deleted files for a while, which
    whoever comes next would pay for.

    Args:
        directory: A directory on it.
        seconds_max: For how long to wait at most, besides the sync of everything that the system
            has to write: others may keep the device busy.
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


def settle_after(directory: Path, nbytes: int) -> None:
    """The same after so many bytes were written, or deleted: little leaves little to do.

    A device that others use never comes to rest, so this waits three seconds at most, behind the
    sync.
    """
    settle(directory, seconds_max=min(_SECONDS_MAX, nbytes / _BYTES_PER_SECOND))
