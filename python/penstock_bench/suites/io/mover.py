"""One process that moves a tensor: ``python -m penstock_bench.suites.io.mover``.

It reads a job as JSON and prints, as the last line, the fields of a `Measurement`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock_bench.harness import cases, storage
from penstock_bench.harness.child import answer, read_job
from penstock_bench.suites.io.cufile_stats import CufileStats
from penstock_bench.suites.io.movers import CUFILE, DEEPSPEED, OF_GPUS

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB = 1 << 20


class _Mover(NamedTuple):
    """A tensor that is filled, the call that moves all of it, and that which writes it first."""

    move: Callable[[], object]
    write: Callable[[], object]
    setup: str


def main() -> None:
    """Does what standard input says."""
    job = read_job()
    path, nbytes, is_write = Path(job["path"]), job["nbytes"], job["pattern"] == "write"
    library = job["library"]
    prepare = _kvikio if library in OF_GPUS else _theirs if library == DEEPSPEED else _ours
    mover = prepare(job)
    begun = time.perf_counter()
    _allocate(path, nbytes)
    if not is_write:
        mover.write()
        _synced(path)
        storage.drop([path])
    opened = time.perf_counter() - begun
    stats = CufileStats.begin() if library == CUFILE else None
    moved, used, begun = 0, time.process_time(), time.perf_counter()
    while True:
        mover.move()
        moved += nbytes
        seconds = time.perf_counter() - begun
        if job["seconds"] is None or seconds >= job["seconds"]:
            break
    cpu_seconds = time.process_time() - used
    answer(
        {
            "nbytes": moved,
            "requests": -(-moved // job["block_bytes"]),
            "seconds": seconds,
            "sync_seconds": _synced(path) if is_write and job["syncs"] else 0.0,
            "open_seconds": opened,
            "cpu_seconds": cpu_seconds,
            "is_direct": job["direct"],
            "setup": mover.setup,
            "path": _way(library, stats),
            "notes": [f"cuFile: {stats.report()}"] if stats is not None else [],
            "rate_spread": [moved / seconds / 1e9],
        }
    )


def _ours(job: dict[str, Any]) -> _Mover:
    from penstock.offload import Buffers, TensorIO

    array = Buffers(job["nbytes"] + 2 * _MIB).empty(job["nbytes"], np.uint8)
    io = TensorIO(
        extent_bytes=job["block_bytes"],
        queue_depth=job["depth"],
        io_threads=job["threads"],
        direct="on" if job["direct"] else "off",
    )
    begin = io.write if job["pattern"] == "write" else io.read
    return _Mover(
        lambda: begin(array, job["path"]).result(),
        _written(job, array),
        "TensorIO, memory of Buffers",
    )


def _theirs(job: dict[str, Any]) -> _Mover:
    # Without GPUs: the tensor lies in the memory of the host.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    op = AsyncIOBuilder().load()
    handle = op.aio_handle(job["block_bytes"], job["depth"], False, True, job["threads"])
    tensor = handle.new_cpu_locked_tensor(job["nbytes"], torch.empty(0, dtype=torch.uint8))
    begin = handle.pwrite if job["pattern"] == "write" else handle.pread

    def move() -> None:
        # The arguments that ds_io passes: no comparison, not waited for.
        if begin(tensor, job["path"], False, True) == -1 or handle.wait() != 1:
            raise RuntimeError(f"DeepSpeed did not move {job['path']}")

    setup = "DeepSpeed's aio_handle, locked memory, overlap_events"
    return _Mover(move, _written(job, tensor.numpy()), setup)


def _written(job: dict[str, Any], array: Any) -> Callable[[], object]:
    """Fills memory of the host; returns what writes it, for a library that only reads."""
    from penstock.offload import TensorIO

    array[:] = np.resize(np.arange(_MIB, dtype=np.uint32).view(np.uint8), job["nbytes"])
    return lambda: TensorIO().write(array, job["path"]).result()


def _kvikio(job: dict[str, Any]) -> _Mover:
    is_cufile, is_write = job["library"] == CUFILE, job["pattern"] == "write"
    path, nbytes = job["path"], job["nbytes"]
    # It reads them when it is imported, whatever its release calls them in Python.
    os.environ |= {
        "KVIKIO_COMPAT_MODE": "OFF" if is_cufile else "ON",
        "KVIKIO_NTHREADS": str(job["threads"] * job["depth"]),
        "KVIKIO_TASK_SIZE": str(job["block_bytes"]),
        # However small a request is.
        "KVIKIO_GDS_THRESHOLD": "0",
        "KVIKIO_AUTO_DIRECT_IO_READ": "ON" if job["direct"] else "OFF",
        "KVIKIO_AUTO_DIRECT_IO_WRITE": "ON" if job["direct"] else "OFF",
    }
    import cupy
    import kvikio

    cupy.cuda.Device(job["device"]).use()
    array = cupy.resize(cupy.arange(1 << 18, dtype=cupy.uint32).view(cupy.uint8), nbytes)
    opened: list[Any] = []

    def move() -> None:
        # Opening it is within the time.
        if not opened:
            opened.append(kvikio.CuFile(path, "r+" if is_write else "r"))
        if (opened[0].write if is_write else opened[0].read)(array) != nbytes:
            raise RuntimeError(f"kvikio moved a part of {path}")

    def write() -> None:
        with kvikio.CuFile(path, "r+") as file:
            file.write(array)

    way = "cuFile" if is_cufile else "its own pread"
    return _Mover(move, write, f"kvikio {kvikio.__version__}, {way}")


def _way(library: str, stats: CufileStats | None) -> str:
    """The path of the bytes between storage and a GPU; nothing without one."""
    if library not in OF_GPUS:
        return ""
    if library != CUFILE:
        return cases.GPU_COPIED
    if stats is None:
        return cases.GPU_UNKNOWN
    return cases.GPU_COMPAT if stats.is_compat() else cases.GPU_DIRECT


def _allocate(path: Path, nbytes: int) -> None:
    """A file that has its space, as every other method has it, and no content."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def _synced(path: Path) -> float:
    """Makes a file durable; how long that took, in seconds."""
    begun = time.perf_counter()
    storage.sync_file(path)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
