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
    """A part of a file, in blocks."""

    file: Path
    offset: int
    nbytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """How fio reads.

    Random reads are of each block once, in any order.
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
    """
    block_bytes = region.block_bytes
    if block_bytes % _SECTOR_BYTES or not _reads(region, block_bytes):
        block_bytes = -(-block_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    rates = {
        load: measured(region, load, seconds=_LOOK_SECONDS).requests_per_second
        for load in (
            Load("io_uring", jobs, depth, block_bytes) for jobs in _JOBS for depth in _DEPTHS
        )
    }
    return max(rates, key=lambda load: rates[load])


def _reads(region: Region, block_bytes: int) -> bool:
    """Whether blocks of a length can be read past the page cache."""
    try:
        measured(region, Load("psync", 1, 1, block_bytes), 64)
    except FioError:
        return False
    return True


def measured(
    region: Region, load: Load, rows: int | None = None, *, seconds: float | None = None
) -> Measurement:
    """A measurement without a case: of some blocks, for a time, or of all once."""
    command = fio.command(
        filename=region.file,
        readonly=True,
        offset=region.offset,
        size=region.nbytes,
        rw="randread" if load.is_random else "read",
        ioengine=load.engine,
        bs=load.block_bytes,
        iodepth=load.depth,
        numjobs=load.jobs,
        thread=True,
        group_reporting=True,
        # Each job with other blocks, each time with others.
        randrepeat=0,
        io_size=rows and max(1, rows // load.jobs) * load.block_bytes,
        time_based=seconds and 1,
        runtime=seconds and f"{round(seconds * 1000)}ms",
    )
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
