"""Crash-safe replacement of small files, and syncing of files and directories."""

from __future__ import annotations

import contextlib
import os


def replace(path: str, content: bytes, *, beside: str | None = None) -> None:
    """Replaces a file atomically: after a crash it has its old contents or the new ones.

    Args:
        path: The path of the file.
        content: The new contents.
        beside: Path of the temporary file, in the same directory. None for a fixed name that the
            next write reuses, so that a killed process leaves at most one: for files that only one
            process writes.
    """
    beside = beside or f"{path}.tmp"
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    sync(os.path.dirname(path) or ".")


def sync(path: str) -> None:
    """Makes the contents of a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
