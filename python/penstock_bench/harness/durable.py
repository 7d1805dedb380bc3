"""Making files durable, the same way for everybody who does not do it, and counting who did."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_SYNC_THREADS = 4


def sync_tree(root: Path) -> None:
    """Syncs every file below a directory, then every directory and the one above it."""
    sync_files(files_below(root))
    sync_directories(root)


def sync_files(files: Iterable[Path]) -> None:
    """Syncs files.

    Several at a time: to sync them one by one would cost a library for having many, which is its
    design and not its lack of an fsync.
    """
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(_sync, files))


def sync_directories(root: Path) -> None:
    """Syncs a directory with those below it, and the one above it."""
    for path in (root.parent, root, *(path for path in root.rglob("*") if path.is_dir())):
        _sync(path)


def files_below(root: Path) -> list[Path]:
    """Every regular file below a directory."""
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


@contextmanager
def counted_syncs() -> Iterator[list[int]]:
    """Counts what Python code of this process syncs, as libraries written in Python do.

    Yields:
        A list that grows with each call of `os.fsync` and `os.fdatasync`, by its descriptor.
    """
    calls: list[int] = []

    def counting(function: Callable[[Any], None]) -> Callable[[Any], None]:
        def counted(descriptor: Any) -> None:
            function(descriptor)
            calls.append(descriptor)

        return counted

    plain = os.fsync, os.fdatasync
    os.fsync, os.fdatasync = map(counting, plain)  # type: ignore[assignment]
    try:
        yield calls
    finally:
        os.fsync, os.fdatasync = plain


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
