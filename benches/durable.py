"""Making files durable, the same way for every contender."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SYNC_THREADS = 4


def sync_tree(root: Path) -> None:
    """Syncs every file below a directory, then every directory and the one above it.

    Several files are synced at a time: to sync them one by one would cost a library for having
    many, which is its design and not its lack of an fsync.
    """
    directories = [root.parent, root, *(path for path in root.rglob("*") if path.is_dir())]
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(_sync, files_below(root)))
    for directory in directories:
        _sync(directory)


def files_below(root: Path) -> list[Path]:
    """Every regular file below a directory."""
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
