"""A process that moves GPU memory by kvikio: ``python -m penstock_bench.suites.io.gpu_mover``.

It reads a job as JSON and prints, as the last line, the fields of a `Measurement`, as `mover` does.
"""

from __future__ import annotations

import os
import time
from typing import Any

from penstock_bench.harness import cases
from penstock_bench.harness.child import answer, read_job
from penstock_bench.suites.io.cufile_stats import CufileStats
from penstock_bench.suites.io.mover import make_empty, synced
from penstock_bench.suites.io.movers import CUFILE


def main() -> None:
    """Does what standard input says."""
    job = read_job()
    path, nbytes, is_write = job["path"], job["nbytes"], job["pattern"] == "write"
    is_cufile = job["library"] == CUFILE
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

    with cupy.cuda.Device(job["device"]):
        array = cupy.resize(cupy.arange(1 << 18, dtype=cupy.uint32).view(cupy.uint8), nbytes)
        begun = time.perf_counter()
        make_empty(path, nbytes)
        if not is_write:
            with kvikio.CuFile(path, "r+") as file:
                file.write(array)
            synced(path)
            _forget(path)
        opened = time.perf_counter() - begun
        stats = CufileStats.begin() if is_cufile else None
        moved, used, begun = 0, time.process_time(), time.perf_counter()
        with kvikio.CuFile(path, "r+" if is_write else "r") as file:
            move = file.write if is_write else file.read
            while True:
                if move(array) != nbytes:
                    raise RuntimeError(f"kvikio moved a part of {path}")
                moved += nbytes
                seconds = time.perf_counter() - begun
                if job["seconds"] is None or seconds >= job["seconds"]:
                    break
        cpu_seconds = time.process_time() - used
        sync_seconds = synced(path) if is_write and job["syncs"] else 0.0
    found: dict[str, Any] = {
        "nbytes": moved,
        "requests": -(-moved // job["block_bytes"]),
        "seconds": seconds,
        "sync_seconds": sync_seconds,
        "open_seconds": opened,
        "cpu_seconds": cpu_seconds,
        "is_direct": job["direct"],
        "setup": f"kvikio {kvikio.__version__}{', cuFile' if is_cufile else ', its own pread'}",
        "path": _path(stats, is_cufile=is_cufile),
        "rate_spread": [moved / seconds / 1e9],
    }
    if stats is not None:
        found["notes"] = [f"cuFile: {stats.report()}"]
    answer(found)


def _path(stats: CufileStats | None, *, is_cufile: bool) -> str:
    if not is_cufile:
        return cases.GPU_COPIED
    if stats is None:
        return cases.GPU_UNKNOWN
    return cases.GPU_COMPAT if stats.is_compat() else cases.GPU_DIRECT


def _forget(path: str) -> None:
    """Drops a synced file from the page cache, so that it is read from storage."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
