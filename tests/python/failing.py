"""Storage that fails below every engine: by the kernel's own errors, or by a FUSE server's."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from conftest import mounted, run_or_skip
from user_space import user_space

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PAGE_BYTES = 4096


class FailingDisk:
    """Ext2 in a sparse file on a full tmpfs: new blocks cannot be written.

    The file system on it does not know that space is short, so it refuses nothing beforehand. It
    has no journal, whose failure would make it read-only.

    Attributes:
        path: Mount point.
    """

    def __init__(self, path: Path, below: Path, size_bytes: int) -> None:
        self.path = path
        self._below = below
        self._size_bytes = size_bytes

    def fail(self, after_bytes: int = 0) -> None:
        """Makes writes fail after so many bytes of new blocks."""
        subprocess.run(["sync", "-f", self.path], check=True)
        stat = os.statvfs(self._below)
        used_bytes = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        self._resize(max(used_bytes + after_bytes, _PAGE_BYTES))

    def heal(self) -> None:
        """Makes all writes succeed again."""
        self._resize(self._size_bytes)

    def _resize(self, size_bytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size_bytes}", self._below], check=True)


@contextmanager
def failing_disk(directory: Path, size_bytes: int) -> Iterator[FailingDisk]:
    """Mounts such a disk; skips the test if mounting is not possible."""
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


class FailingFiles:
    """A file system in user space with failing operations (`failing_files.py`).

    Attributes:
        path: Mount point.
    """

    def __init__(self, path: Path, server: subprocess.Popen[str]) -> None:
        self.path = path
        self._server = server

    def fail(
        self, operation: str, kind: str, skip: int = 0, count: int = 1, name: str = ""
    ) -> None:
        """Makes some operations fail; see `failing_files.Fault`."""
        told = {"operation": operation, "kind": kind, "skip": skip, "count": count, "name": name}
        self._tell(told)

    def heal(self) -> tuple[dict[str, int], int]:
        """Ends the faults; returns the operations since `fail` by name, and the failed ones."""
        done = self._tell(None)
        return done["counts"], done["failed"]

    def _tell(self, told: dict[str, object] | None) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(told) + "\n")
        self._server.stdin.flush()
        done: dict[str, Any] = json.loads(self._server.stdout.readline())
        return done


@contextmanager
def failing_files(directory: Path) -> Iterator[FailingFiles]:
    """Mounts such a file system; skips the test if mounting is not possible."""
    directory.mkdir()
    with user_space(directory, "failing_files.py") as (path, server):
        files = FailingFiles(path, server)
        try:
            yield files
        finally:
            files.heal()
