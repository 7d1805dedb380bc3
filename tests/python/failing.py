"""A disk whose writes fail below every engine, by the error of the kernel itself."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from conftest import mounted, run_or_skip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PAGE_BYTES = 4096


class FailingDisk:
    """Ext2 in a sparse file on a tmpfs: where that is full, a block that is new cannot be written.

    The file system on it knows of no lack of room, so nothing is refused beforehand. It has no
    journal, whose end would make it read-only.

    Attributes:
        path: Where it is mounted.
    """

    def __init__(self, path: Path, below: Path, size_bytes: int) -> None:
        self.path = path
        self._below = below
        self._size_bytes = size_bytes

    def fail(self, after_bytes: int = 0) -> None:
        """Lets writes fail, once so many bytes of new blocks are written."""
        subprocess.run(["sync", "-f", self.path], check=True)
        stat = os.statvfs(self._below)
        used_bytes = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        self._resize(max(used_bytes + after_bytes, _PAGE_BYTES))

    def heal(self) -> None:
        """Lets all writes through again."""
        self._resize(self._size_bytes)

    def _resize(self, size_bytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size_bytes}", self._below], check=True)


@contextmanager
def failing_disk(directory: Path, size_bytes: int) -> Iterator[FailingDisk]:
    """Such a disk; skips where this machine does not let us mount one."""
    directory.mkdir()
    with mounted("tmpfs", directory / "below", size_bytes) as below:
        image, path = below / "disk", directory / "disk"
        path.mkdir()
        image.touch()
        os.truncate(image, size_bytes)
        run_or_skip(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", image])
        run_or_skip(["mount", "-o", "loop,errors=continue", image, path])
        disk = FailingDisk(path, below, 2 * size_bytes)
        try:
            disk.heal()
            yield disk
        finally:
            disk.heal()
            subprocess.run(["umount", path], check=True)
