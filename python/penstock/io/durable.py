"""Small files and names in directories that survive a power cut, beside what checkpoints hold."""

from __future__ import annotations

import contextlib
import os


def replace(path: str, content: bytes, *, beside: str | None = None) -> None:
    """Writes a file so that after a crash it is the old one or this one.

    Args:
        path: The file.
        content: Its bytes.
        beside: Where it is written first, in the same directory. None for a name that whoever
            writes the file next takes again, so that a kill leaves one at most: for files that
            one process writes.

    Raises:
        OSError: The operating system failed it, and the old one is there.
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
    """Makes a file durable, or the names in a directory.

    Raises:
        OSError: The operating system failed it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
