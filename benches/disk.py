"""The block device under a directory: at rest before every measurement, and described."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import psutil

from penstock.bench.facts import queue_of

_SETTLE_SECONDS_MAX = 30.0
_QUIET_SECONDS = 0.3


def settle(directory: Path) -> None:
    """Waits until the device has nothing left to do from what came before.

    Files that a contender wrote are deleted after its load; on a file system that discards, the
    device goes on trimming them for a while, which the next contender would pay for.
    """
    os.sync()
    stat = _sys_directory(directory) / "stat"
    deadline = time.monotonic() + _SETTLE_SECONDS_MAX
    before = None
    while time.monotonic() < deadline:
        now = stat.read_text() if stat.exists() else ""
        if now == before:
            return
        before = now
        time.sleep(_QUIET_SECONDS)


def describe(directory: Path) -> dict[str, Any]:
    """File system, device and alignment of a directory."""
    partitions = [
        part
        for part in psutil.disk_partitions(all=True)
        if directory == Path(part.mountpoint) or Path(part.mountpoint) in directory.parents
    ]
    mount = max(partitions, key=lambda part: len(part.mountpoint))
    usage = psutil.disk_usage(str(directory))
    return {
        "directory": str(directory),
        "file_system": mount.fstype,
        "mount_options": mount.opts,
        "device": mount.device,
        "size_bytes": usage.total,
        "free_bytes": usage.free,
        "direct_io_alignment": _direct_io_alignment(directory),
        "queue": queue_of(directory),
    }


def _sys_directory(directory: Path) -> Path:
    device = directory.stat().st_dev
    return Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")


def _direct_io_alignment(directory: Path) -> dict[str, int] | None:
    """What statx(STATX_DIOALIGN) asks of memory and offsets; None where the kernel cannot say."""
    at_fdcwd, dio_align = -100, 0x2000
    # struct statx: stx_mask at 0, stx_dio_mem_align at 152, stx_dio_offset_align at 156.
    answer = ctypes.create_string_buffer(256)
    library = ctypes.CDLL(None)
    if not hasattr(library, "statx"):
        return None
    probe = directory / ".alignment"
    probe.touch()
    try:
        if library.statx(at_fdcwd, os.fsencode(probe), 0, dio_align, answer):
            return None
    finally:
        probe.unlink()
    mask, memory, offset = (
        int.from_bytes(answer.raw[at : at + 4], "little") for at in (0, 152, 156)
    )
    return {"memory_bytes": memory, "offset_bytes": offset} if mask & dio_align else None
