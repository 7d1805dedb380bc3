"""The link itself, and what it costs to pin memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.common.machine import gpus

if TYPE_CHECKING:
    from penstock_bench.suites.gpu.run import Run

_WAYS = {"to_device": "to the GPU", "to_host": "from it", "both": "both ways"}


def measure(run: Run) -> None:
    """Rates by sizes of copies, a call for each and one for many."""
    sizes = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
    run.progress("the link")
    found = gpus.link(
        0,
        block_bytes=sizes[:3] if run.is_small else sizes,
        window_bytes=(8 if run.is_small else 256) << 20,
        seconds=0.005 if run.is_small else 0.1,
        rounds=run.rounds,
        is_batched=(False, True),
    )
    for rate in found.rates:
        how = "one call" if rate.is_batched else "a call each"
        name = f"link {_WAYS[rate.way]}, {rate.block_bytes >> 10} KiB, {how}, GB/s"
        for value in rate.gb_per_second:
            run.results.figure(name, value)
    if found.unpinned is not None:
        run.results.figure(f"not pinned: {found.unpinned}", 0)


def pinning(run: Run) -> None:
    """Memory of a gigabyte: touched by threads and registered, and allocated by the driver."""
    for _ in run.each_round("pinning"):
        found = gpus.pinning(0, (16 << 20) if run.is_small else (1 << 30))
        run.results.add("pinning", found.driver_seconds / found.ours_seconds)
        for name, seconds in (
            ("ours", found.ours_seconds),
            ("cudaHostAlloc", found.driver_seconds),
        ):
            run.results.figure(f"pinning, {name}, GB/s", found.bytes / seconds / 1e9)
        for name, seconds in (
            ("ours", found.ours_release_seconds),
            ("cudaFreeHost", found.driver_release_seconds),
        ):
            run.results.figure(
                f"giving pinned memory back, {name}, s/GB", seconds / found.bytes * 1e9
            )
