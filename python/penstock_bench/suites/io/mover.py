"""One process that moves a tensor: ``python -m penstock_bench.suites.io.mover``.

It reads a job as JSON and prints, as the last line, the fields of a `Measurement`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.offload import Buffers, TensorIO
from penstock_bench.harness.child import answer, read_job

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB = 1 << 20


def main() -> None:
    """Does what standard input says."""
    job = read_job()
    path, nbytes, is_write = job["path"], job["nbytes"], job["pattern"] == "write"
    prepare = _theirs if job["library"] == "deepspeed" else _ours
    array, move, setup = prepare(job)
    array[:] = np.resize(np.arange(_MIB, dtype=np.uint32).view(np.uint8), nbytes)
    begun = time.perf_counter()
    _make(path, array, is_empty=is_write)
    opened = time.perf_counter() - begun
    moved, used, begun = 0, time.process_time(), time.perf_counter()
    while True:
        move()
        moved += nbytes
        seconds = time.perf_counter() - begun
        if job["seconds"] is None or seconds >= job["seconds"]:
            break
    cpu_seconds = time.process_time() - used
    sync_seconds = synced(path) if is_write and job["syncs"] else 0.0
    found = {
        "nbytes": moved,
        "requests": -(-moved // job["block_bytes"]),
        "seconds": seconds,
        "sync_seconds": sync_seconds,
        "open_seconds": opened,
        "cpu_seconds": cpu_seconds,
        "is_direct": job["direct"],
        "setup": setup,
        "rate_spread": [moved / seconds / 1e9],
    }
    answer(found)


def _ours(job: dict[str, Any]) -> tuple[Any, Callable[[], object], str]:
    array = Buffers(job["nbytes"] + 2 * _MIB).empty(job["nbytes"], np.uint8)
    io = TensorIO(
        extent_bytes=job["block_bytes"],
        queue_depth=job["depth"],
        io_threads=job["threads"],
        direct="on" if job["direct"] else "off",
    )
    begin = io.write if job["pattern"] == "write" else io.read
    return array, lambda: begin(array, job["path"]).result(), "TensorIO, memory of Buffers"


def _theirs(job: dict[str, Any]) -> tuple[Any, Callable[[], object], str]:
    # Without GPUs: the tensor lies in the memory of the host.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = (
        AsyncIOBuilder()
        .load()
        .aio_handle(job["block_bytes"], job["depth"], False, True, job["threads"])
    )
    tensor = handle.new_cpu_locked_tensor(job["nbytes"], torch.empty(0, dtype=torch.uint8))
    begin = handle.pwrite if job["pattern"] == "write" else handle.pread

    def move() -> None:
        # The arguments that ds_io passes: no comparison, not waited for.
        if begin(tensor, job["path"], False, True) == -1 or handle.wait() != 1:
            raise RuntimeError(f"DeepSpeed did not move {job['path']}")

    return tensor.numpy(), move, "DeepSpeed's aio_handle, locked memory, overlap_events"


def _make(path: str, array: Any, *, is_empty: bool) -> None:
    """The file to read; or the space of the one to write, as every other method has it."""
    if is_empty:
        make_empty(path, array.nbytes)
        return
    with TensorIO() as io:
        io.write(array, path, sync=True).result()


def make_empty(path: str, nbytes: int) -> None:
    """A file that has its space and no content."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def synced(path: str) -> float:
    """Makes a file durable; how long that took, in seconds."""
    begun = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
