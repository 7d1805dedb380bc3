"""Files of a measurement: evicted from the page cache before reads, made durable after writes."""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def drop(files: Iterable[Path]) -> None:
    """Evicts files from the page cache; what is not synced stays in it."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def drop_everything(files: Iterable[Path]) -> str:
    """Evicts files, and as root everything else, from the page cache; says how.

    For a machine of one's own: whatever else runs there finds its files gone from memory.
    """
    drop(files)
    if not os.access(_DROP_CACHES, os.W_OK):
        return "fadvise"
    try:
        _DROP_CACHES.write_text("3")
    except OSError:
        return "fadvise"
    return "fadvise, drop_caches"


def resident_fraction(files: Iterable[Path]) -> float:
    """The share of the files' pages that is in the page cache, as mincore(2) has it."""
    resident, total = resident_pages(files)
    return resident / total if total else 0.0


def resident_pages(files: Iterable[Path]) -> tuple[int, int]:
    """How many of the files' pages are in the page cache, and how many there are."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    resident = total = 0
    for path in files:
        length = path.stat().st_size
        if not length:
            continue
        pages = -(-length // mmap.PAGESIZE)
        vector = ctypes.create_string_buffer(pages)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Python's own mmap does not tell its address.
            address = library.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
            if address == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "mmap failed", str(path))
            failed = library.mincore(address, length, vector)
            library.munmap(address, length)
        finally:
            os.close(descriptor)
        if failed:
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        # The lowest bit of a page's byte says it; the others may hold anything.
        resident += int(np.count_nonzero(np.frombuffer(vector.raw, np.uint8)[:pages] & 1))
        total += pages
    return resident, total


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
        list(pool.map(sync_file, files))


def sync_directories(root: Path) -> None:
    """Syncs a directory with those below it, and the one above it."""
    for path in (root.parent, root, *(path for path in root.rglob("*") if path.is_dir())):
        sync_file(path)


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


def sync_file(path: Path) -> None:
    """Syncs a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
