"""What the kernel says in its files."""

from __future__ import annotations

from pathlib import Path


def read(path: str | Path) -> str | None:
    """The text of a file of the kernel's; None where there is none for us."""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
