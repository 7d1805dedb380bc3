"""Who gathers rows by id, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock_bench import peers


@dataclass(frozen=True)
class Entry(peers.Entry):
    """A way to gather rows.

    Attributes:
        has_files: Whether it reads from files that it makes before.
        library_bytes: Memory that its library takes by itself, added to its limit.
        waits: Whether it reads one row after the other, so that a part of a trace in which no row
            comes twice has the same rate as all of it.
    """

    has_files: bool = False
    library_bytes: int = 0
    waits: bool = False


def _ours(note: str, **options: Any) -> Entry:
    return Entry(f"{__name__}.ours", "Ours", "", note, options=options)


def _library(attribute: str, package: str, note: str, **rest: Any) -> Entry:
    if package == "torch":
        rest["library_bytes"] = _TORCH_BYTES
    return Entry(f"{__name__}.libraries", attribute, package, note, **rest)


def _of_files(name: str, attribute: str, package: str, note: str) -> Entry:
    return _library(attribute, package, note, library=name, has_files=True, waits=True)


def _emulated(attribute: str, note: str) -> Entry:
    return Entry(f"{__name__}.emulated", attribute, "", f"emulated: {note}")


OURS, POOL = "penstock", "pread-pool"
RESIDENT, REUSED = "in-memory", "in-memory-out"
POOL_THREADS = 32
FORESEEING = "penstock-1000"
CALLS = "penstock-gather"
EXACT, SCAN, UNCHECKED = "penstock-exact", "penstock-scan", "penstock-unchecked"

_TORCH_BYTES = 320 << 20
"""Without files: what PyTorch 2.15 has when it is imported."""

GATHERERS = {
    OURS: _ours("stream, a window of 8 batches, rows checked"),
    EXACT: _ours("the same, and reads nothing between rows", gap_bytes=0),
    UNCHECKED: _ours("the same as penstock, rows not checked", is_checked=False),
    "penstock-async": _ours("gather_async, one batch ahead", window=None),
    CALLS: _ours("gather, one call after the other", window=None, ahead=0),
    SCAN: _ours("reads whatever lies between rows", gap_bytes=1 << 30),
    # The number is the window.
    "penstock-0": _ours("stream that knows of no batch ahead", window=0),
    "penstock-64": _ours("stream that knows of 64 batches", window=64),
    FORESEEING: _ours("stream that knows of 1000 batches", window=1000),
    "penstock-s3fifo": _ours("S3-FIFO, no batch ahead", window=0, policy="s3fifo"),
    POOL: _ours(
        f"penstock without io_uring: {POOL_THREADS} threads that pread, gap 0, not checked",
        gap_bytes=0,
        is_checked=False,
        threads=POOL_THREADS,
    ),
    RESIDENT: _library("Resident", "torch", "torch.index_select of rows in memory"),
    REUSED: _library(
        "Resident", "torch", "the same into memory that is used again", options={"reuses": True}
    ),
    "memmap": _library("Memmap", "", "numpy.memmap, one thread", waits=True),
    "mmap-random": _library("RandomMapped", "", "mmap with MADV_RANDOM, one thread", waits=True),
    "torch-mmap": _library("TorchMapped", "torch", "torch.index_select over a mapping", waits=True),
    "lmdb": _of_files("lmdb", "Lmdb", "lmdb", "LMDB, getmulti"),
    "rocksdict": _of_files("rocksdict", "RocksDict", "rocksdict", "RocksDB, multi_get"),
    "lance": _of_files("lance", "Lance", "pylance", "Lance, take"),
    "graphbolt": _emulated("GraphBolt", "SIEVE, groups waited for"),
    "ginex": _emulated("Ginex", "Belady, 8 preads a core"),
    "gids": _emulated("Gids", "4 KiB lines, window, accumulator"),
}
"""In the order of the first round."""
