"""The block device under a directory, described."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import psutil

from penstock.machine.facts import queue_of


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
