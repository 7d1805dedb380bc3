"""A `Case` of requests, and named sets of cases."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

Pattern = Literal["write", "read", "random_read"]
Method = Literal["posix", "threads", "uring", "uring_registered", "executor", "cufile"]
Layout = Literal["file_per_tensor", "file_per_process", "shared_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one kind.

    Attributes:
        pattern: What is asked of the files.
        method: How requests reach the kernel; ``"posix"`` has one in flight on each thread,
            ``"threads"`` a pool for them, ``"executor"`` batches of up to 1024 from one caller;
            ``"cufile"`` is one at a time on each thread, for memory of a GPU.
        direct: Whether they go past the page cache.
        layout: Which files the bytes lie in.
        aggregated: Whether tensors are packed into blocks; else no request spans two.
        block_bytes: The largest request.
        depth: Requests in flight on each thread.
        threads: Of each process.
        processes: How many.
        tensors: Whether the bytes are tensors of a model, which are copied into the buffers.
        seconds: For how long, over and over; None for once.
        syncs: Whether what was written is synced.
        device: The GPU whose memory is read into or written from; None for memory of the host.
    """

    pattern: Pattern = "write"
    method: Method = "uring"
    direct: bool = True
    layout: Layout = "file_per_process"
    aggregated: bool = True
    block_bytes: int = MIB
    depth: int = 16
    threads: int = 1
    processes: int = 1
    tensors: bool = False
    seconds: float | None = None
    syncs: bool = True
    device: int | None = None

    @property
    def label(self) -> str:
        """In words, with what is as usual left out."""
        words = [
            self.pattern.replace("_", " "),
            self.method.replace("_", " "),
            "direct" if self.direct else "buffered",
            f"{size(self.block_bytes)} x {self.depth}",
        ]
        if self.threads > 1:
            words.append(f"{self.threads} threads")
        if self.processes > 1:
            words.append(f"{self.processes} processes")
        if self.tensors:
            words.append(self.layout.replace("_", " "))
            words.append("aggregated" if self.aggregated else "tensor by tensor")
        if self.device is not None:
            words.append(f"{'from' if self.pattern == 'write' else 'to'} cuda:{self.device}")
        return ", ".join(words)

    def as_json(self) -> dict[str, Any]:
        """Its settings."""
        return dataclasses.asdict(self)


def size(nbytes: int) -> str:
    """Bytes as benchmarks write them: ``4K``, ``1M``."""
    for unit, letter in ((GIB, "G"), (MIB, "M"), (KIB, "K")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)


def tensor_sizes(total_bytes: int) -> list[int]:
    """Sizes of the tensors of a transformer block by block, as many blocks as fit.

    Of width 1024 in two bytes: four attention matrices, three of the feed-forward network, two
    norms. Sizes range from 2 KiB to 5.5 MiB.
    """
    width = 1024
    norm, square, wide = 2 * width, 2 * width * width, 2 * width * 2816
    block = [norm, *[square] * 4, norm, *[wide] * 3]
    blocks = max(1, total_bytes // sum(block))
    return block * blocks


PRESETS = {
    "quick": "what a device gives at the usual settings, in a minute",
    "paper": "methods x layouts x aggregation, after arXiv 2512.24511",
    "ds_io": "the grid of DeepSpeed's ds_io sweep",
    "gdsio": "block sizes 8K to 1M x threads 1 to 128, after GDSIO",
}
"""Every preset with its description."""


def preset(name: str) -> list[Case]:
    """The cases of a preset."""
    return list({"quick": _quick, "paper": _paper, "ds_io": _ds_io, "gdsio": _gdsio}[name]())


def _quick() -> Iterator[Case]:
    for pattern in ("write", "read"):
        yield Case(pattern=pattern)
        yield Case(pattern=pattern, direct=False, method="posix", depth=1)
    yield Case(pattern="random_read", block_bytes=4 * KIB, depth=64, seconds=3.0)
    yield Case(pattern="random_read", block_bytes=4 * KIB, depth=1, method="posix", seconds=3.0)


def _paper() -> Iterator[Case]:
    methods: tuple[Method, ...] = ("posix", "uring", "uring_registered")
    layouts: tuple[Layout, ...] = ("file_per_tensor", "file_per_process", "shared_file")
    patterns: tuple[Pattern, ...] = ("write", "read")
    for pattern, layout, method, direct, aggregated, processes in itertools.product(
        patterns, layouts, methods, (False, True), (False, True), (1, 4)
    ):
        yield Case(
            pattern=pattern,
            method=method,
            direct=direct,
            layout=layout,
            aggregated=aggregated,
            block_bytes=4 * MIB,
            depth=1 if method == "posix" else 8,
            processes=processes,
            tensors=True,
        )


def _ds_io() -> Iterator[Case]:
    patterns: tuple[Pattern, ...] = ("read", "write")
    for pattern, block_bytes, depth, threads in itertools.product(
        patterns, (MIB, 8 * MIB), (32, 128), (1, 2, 4, 8)
    ):
        yield Case(pattern=pattern, block_bytes=block_bytes, depth=depth, threads=threads)


def _gdsio() -> Iterator[Case]:
    blocks = (8 * KIB, 16 * KIB, 64 * KIB, 128 * KIB, MIB)
    for block_bytes, threads in itertools.product(blocks, (1, 4, 8, 16, 32, 64, 128)):
        yield Case(
            pattern="read",
            method="posix",
            block_bytes=block_bytes,
            depth=1,
            threads=threads,
            seconds=2.0,
        )


WRITTEN_DEPTH = 8
"""Requests in flight where threads write what will be read: as fast as it goes, nobody looks."""

BLOCK_BYTES_MAX = (1 << 32) - 4096


def share_bytes(case: Case, size: int) -> int:
    """Bytes of one process: whole blocks for all threads."""
    unit = case.block_bytes * case.threads
    return max(1, math.floor(size / case.processes / unit)) * unit


def total_bytes(case: Case, size: int) -> int:
    """Bytes of all processes that a case of a size comes to.

    At least a block for each thread, and of tensors a whole one for each process.
    """
    share = share_bytes(case, size)
    return case.processes * (sum(tensor_sizes(share)) if case.tensors else share)


def buffer_bytes(case: Case, size: int) -> int:
    """Memory of the requests that all processes have in flight at most."""
    each = case.depth * case.threads
    if case.method == "executor":
        # Two batches of its own.
        batch = min(1024, max(1, 64 * MIB // case.block_bytes))
        return 2 * case.block_bytes * max(each, batch) * case.processes
    if case.method in ("posix", "threads", "cufile") and case.pattern != "write":
        each = max(each, WRITTEN_DEPTH)
    in_flight = case.block_bytes * each * case.processes
    # With a time to go on for, a queue is filled whatever the files have.
    return in_flight if case.seconds else min(in_flight, total_bytes(case, size))


GPU_DIRECT = "GPUD"
HOST_ONLY = "CPUONLY"
GPU_COPIED = "CPU_GPU"
GPU_OVERLAPPED = "CPU_ASYNC_GPU"
GPU_CACHED = "CPU_CACHED_GPU"
GPU_COMPAT = "GPUD, compat"
GPU_UNKNOWN = "GPUD, untold"

GPU_PATHS = {
    GPU_DIRECT: "storage, GPU: past memory of the host (gdsio -x 0)",
    HOST_ONLY: "storage, memory of the host: no GPU (gdsio -x 1)",
    GPU_COPIED: "storage, memory of the host, GPU: each copy waited for (gdsio -x 2)",
    GPU_OVERLAPPED: "storage, pinned memory, GPU: copies while others are under way (gdsio -x 3)",
    GPU_CACHED: "storage, page cache, pinned memory, GPU (gdsio -x 4)",
    GPU_COMPAT: "storage, memory of the host, GPU: cuFile in compat mode, by its own counters",
    GPU_UNKNOWN: "cuFile does not tell which way it went: it has no counters (before 1.15)",
}
"""The meaning of each path, from or to storage."""


def gpu_path(case: Case, is_direct: bool, counts: list[dict[str, int] | None]) -> str:
    """The path that requests of Penstock took.

    The counts are those of cuFile in each process; None where it does not count.
    """
    if case.method == "cufile":
        if None in counts:
            return GPU_UNKNOWN
        return GPU_COMPAT if any(one["by_host"] for one in counts if one) else GPU_DIRECT
    if not is_direct:
        return GPU_CACHED
    return GPU_COPIED if case.method == "posix" else GPU_OVERLAPPED
