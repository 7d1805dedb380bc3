"""Reads of a part of a file by fio: rows at random, at its best depth; or all of it in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock_bench.harness import fio
from penstock_bench.harness.fio import FioError
from penstock_bench.results.results import Measurement

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK_BYTES, _SECTOR_BYTES = 4096, 512
_LOOK_SECONDS = 0.7


class Region(NamedTuple):
    """A part of a file, in blocks.

    Attributes:
        file: Which.
        offset: Where it begins.
        nbytes: How long it is.
        block_bytes: What is read of it at a time.
    """

    file: Path
    offset: int
    nbytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """How fio reads.

    Attributes:
        engine: One of its own.
        jobs: How many at a time.
        depth: Requests in flight of each.
        block_bytes: Of a request.
        is_random: Whether in any order, each block once; else in order.
    """

    engine: str
    jobs: int
    depth: int
    block_bytes: int
    is_random: bool = True

    @property
    def in_flight(self) -> int:
        """Requests of all jobs."""
        return self.jobs * self.depth


SCAN = Load("io_uring", 1, 64, 1 << 20, is_random=False)
_JOBS, _DEPTHS = (1, 2), (32, 64, 128, 256)


def pool(threads: int, block_bytes: int) -> Load:
    """So many threads, each of which waits for its one request."""
    return Load("psync", threads, 1, block_bytes)


def best(region: Region) -> Load:
    """The load with which random reads are fastest.

    Of blocks as long as a row, where the device has such; else of 4 KiB.

    Raises:
        FioError: fio is missing, or failed.
    """
    block_bytes = region.block_bytes
    if block_bytes % _SECTOR_BYTES or not _reads(region, block_bytes):
        block_bytes = -(-block_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    rates = {
        load: _measured(region, load, seconds=_LOOK_SECONDS).requests_per_second
        for load in (
            Load("io_uring", jobs, depth, block_bytes) for jobs in _JOBS for depth in _DEPTHS
        )
    }
    return max(rates, key=lambda load: rates[load])


def _reads(region: Region, block_bytes: int) -> bool:
    """Whether blocks of a length can be read past the page cache."""
    try:
        _measured(region, Load("psync", 1, 1, block_bytes), rows=64)
    except FioError:
        return False
    return True


def measured(region: Region, load: Load, rows: int | None) -> Measurement:
    """A measurement without a case.

    Args:
        region: What to read.
        load: How.
        rows: How many blocks; None for all of them.

    Raises:
        FioError: fio is missing, or failed.
    """
    return _measured(region, load, rows=rows)


def _measured(
    region: Region, load: Load, *, rows: int | None = None, seconds: float | None = None
) -> Measurement:
    command = [
        "fio",
        "--name=bench",
        f"--filename={region.file}",
        "--readonly",
        f"--offset={region.offset}",
        f"--size={region.nbytes}",
        f"--rw={'randread' if load.is_random else 'read'}",
        "--direct=1",
        f"--ioengine={load.engine}",
        f"--bs={load.block_bytes}",
        f"--iodepth={load.depth}",
        f"--numjobs={load.jobs}",
        "--thread",
        "--group_reporting",
        "--iomem_align=2m",
        # Each job with other blocks, each time with others.
        "--randrepeat=0",
        "--output-format=json",
    ]
    if rows is not None:
        command.append(f"--io_size={max(1, rows // load.jobs) * load.block_bytes}")
    if seconds is not None:
        command += ["--time_based=1", f"--runtime={round(seconds * 1000)}ms"]
    told = fio.job(command)
    side = told["read"]
    if not side["runtime"]:
        raise FioError("fio counts milliseconds, and it took none: choose a larger size")
    return Measurement(
        case="",
        by="",
        round_index=0,
        # A block that is larger than a row counts as a row.
        nbytes=side["total_ios"] * region.block_bytes if load.is_random else side["io_bytes"],
        requests=side["total_ios"],
        seconds=side["runtime"] / 1000,
        cpu_seconds=fio.cpu_seconds(told),
        is_direct=True,
        setup=" ".join(command[1:]),
        rows=side["total_ios"],
        read_bytes=side["io_bytes"],
    )
