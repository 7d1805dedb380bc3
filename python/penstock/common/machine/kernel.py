"""Reads files of the kernel (procfs, sysfs)."""

from __future__ import annotations

from pathlib import Path


def read(path: str | Path) -> str | None:
    """Returns the text of a kernel's file; None if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
