"""Who gathers rows by id: by name, each imported in its own process."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_bench.peers.gather.base import Gatherer


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of one without importing it.

    Attributes:
        module: The module of its class, in this package.
        attribute: Its class there.
        note: What it does.
        library: What has to be there to be imported; None for nothing.
        package: What that is called by pip.
        options: What its class is made with.
        has_files: Whether it reads from files that it makes before.
        library_bytes: What its library takes by itself, for which its limit is higher.
        waits: Whether it asks for rows one after the other, so that a part of a trace in which no
            row comes twice tells as much as all of it.
    """

    module: str
    attribute: str
    note: str
    library: str | None = None
    package: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    has_files: bool = False
    library_bytes: int = 0
    waits: bool = False

    @property
    def missing(self) -> str | None:
        """What to do to have it; None where it is there."""
        if self.library is None or find_spec(self.library) is not None:
            return None
        return f"{self.package} is not installed: pip install {self.package}"

    def gatherer(self) -> Gatherer:
        """One of it.

        Raises:
            ImportError: Its library is not installed, or does not work with what is.
        """
        made: Gatherer = getattr(import_module(f"{__name__}.{self.module}"), self.attribute)(
            **self.options
        )
        return made


def _ours(note: str, **options: Any) -> Entry:
    return Entry(module="ours", attribute="Ours", note=note, options=options)


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
    RESIDENT: Entry(
        module="resident",
        attribute="Resident",
        note="torch.index_select of rows in memory",
        library="torch",
        package="torch",
        library_bytes=_TORCH_BYTES,
    ),
    REUSED: Entry(
        module="resident",
        attribute="Resident",
        note="the same into memory that is used again",
        library="torch",
        package="torch",
        options={"reuses": True},
        library_bytes=_TORCH_BYTES,
    ),
    "memmap": Entry(
        module="mapped", attribute="Memmap", note="numpy.memmap, one thread", waits=True
    ),
    "mmap-random": Entry(
        module="mapped",
        attribute="RandomMapped",
        note="mmap with MADV_RANDOM, one thread",
        waits=True,
    ),
    "torch-mmap": Entry(
        module="mapped",
        attribute="TorchMapped",
        note="torch.index_select over a mapping",
        library="torch",
        package="torch",
        library_bytes=_TORCH_BYTES,
        waits=True,
    ),
    "lmdb": Entry(
        module="lmdb",
        attribute="Lmdb",
        note="LMDB, getmulti",
        library="lmdb",
        package="lmdb",
        has_files=True,
        waits=True,
    ),
    "rocksdict": Entry(
        module="rocksdict",
        attribute="RocksDict",
        note="RocksDB, multi_get",
        library="rocksdict",
        package="rocksdict",
        has_files=True,
        waits=True,
    ),
    "lance": Entry(
        module="lance",
        attribute="Lance",
        note="Lance, take",
        library="lance",
        package="pylance",
        has_files=True,
        waits=True,
    ),
    "graphbolt": Entry(
        module="emulated", attribute="GraphBolt", note="emulated: SIEVE, groups waited for"
    ),
    "ginex": Entry(module="emulated", attribute="Ginex", note="emulated: Belady, 8 preads a core"),
    "gids": Entry(
        module="emulated", attribute="Gids", note="emulated: 4 KiB lines, window, accumulator"
    ),
}
"""In the order of the first round."""
