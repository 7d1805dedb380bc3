"""GPUs as reported by the driver that Penstock uses, without PyTorch."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock import _native
from penstock.common.machine.kernel import read

Way = Literal["to_device", "to_host", "both"]

LANE_GB_PER_SECOND = {
    "2.5": 0.25, "5.0": 0.5, "8.0": 0.985, "16.0": 1.969, "32.0": 3.938, "64.0": 7.563,
}  # fmt: skip
"""Throughput of a PCIe lane, GB/s, by transfer rate in GT/s, after the encoding (PCI Express Base
Specification).
"""

_CUFILE = "libcufile.so.0"
_PCI_DEVICES = Path("/sys/bus/pci/devices")


class Gpu(NamedTuple):
    """One device of the driver.

    Attributes:
        ordinal: The device's number in this process.
        name: The vendor's name of the device.
        pci_bus_id: The address on the PCI bus.
        free_bytes: Free memory.
        total_bytes: Total memory.
        problem: Why the device cannot be used; other fields are then unknown. None if it is usable.
    """

    ordinal: int
    name: str
    pci_bus_id: str
    free_bytes: int
    total_bytes: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Driver:
    """A CUDA driver and its state.

    Attributes:
        path: A path, or a name that the loader resolves.
        is_found: Whether the library exists.
        version: The CUDA version of the driver.
        problem: Why the driver cannot be used; None if it is usable.
        device_count: Number of its devices.
        gpus: The devices that were examined.
    """

    path: str
    is_found: bool
    version: str | None
    problem: str | None
    device_count: int
    gpus: list[Gpu]


def probe_driver(only: int | None = None) -> Driver:
    """Examines the driver of this process, or the one that ``PENSTOCK_CUDA_DRIVER`` names.

    Args:
        only: The device to examine; None for all, which takes half a second each.
    """
    found = json.loads(_native.probe_gpus(only))
    gpus = [Gpu(**one) for one in found.pop("devices")]
    return Driver(**found, gpus=gpus)


def usable(ordinal: int) -> str | None:
    """Returns why a device cannot be used here, in words for the user; None if it can."""
    driver = probe_driver(ordinal)
    if driver.problem is not None:
        return driver.problem
    if not driver.gpus:
        devices = f"{driver.device_count} device{'s'[: driver.device_count != 1]}"
        return f"the driver has {devices}: there is no cuda:{ordinal}"
    return driver.gpus[0].problem


def cufile() -> str | None:
    """Returns the path of cuFile, or a name that the loader resolves; None if it is missing.

    ``PENSTOCK_CUFILE`` comes first, then the system's library, then NVIDIA's package that PyTorch
    installs.
    """
    given = os.environ.get("PENSTOCK_CUFILE")
    if given:
        return given
    try:
        ctypes.CDLL(_CUFILE)
    except OSError:
        package = importlib.util.find_spec("nvidia")
        places = (package.submodule_search_locations if package else None) or []
        found = [path for place in places for path in Path(place).glob(f"*/lib/{_CUFILE}")]
        return str(found[0]) if found else None
    return _CUFILE


def bus_gb_per_second(pci_bus_id: str) -> float | None:
    """Returns the bus's peak throughput of a device in one direction, GB/s; None if unknown."""
    place = _PCI_DEVICES / pci_bus_id
    # The current link speed may be lower: an idle device saves power.
    speed, lanes = read(place / "max_link_speed"), read(place / "max_link_width")
    if not speed or not lanes or not lanes.isdecimal():
        return None
    lane = LANE_GB_PER_SECOND.get(speed.split()[0])
    return None if lane is None else lane * int(lanes)


class Rate(NamedTuple):
    """Measured throughput of one kind of copy.

    Attributes:
        way: The direction; for ``"both"``, the sum of both directions.
        block_bytes: Size of one copy.
        is_batched: Whether one call queues many copies, or one call each.
        gb_per_second: The throughput of each round.
    """

    way: Way
    block_bytes: int
    is_batched: bool
    gb_per_second: list[float]


class Link(NamedTuple):
    """Measured throughput between host and device.

    Attributes:
        rates: One entry per kind of copy; each was measured once per round.
        unpinned: Why host memory could not be pinned, in which case the rates are of pageable
            memory; None if it was pinned.
    """

    rates: list[Rate]
    unpinned: str | None

    def of(self, way: Way) -> Rate:
        """Returns the first rate in a direction."""
        return next(rate for rate in self.rates if rate.way == way)


def link(
    ordinal: int,
    *,
    block_bytes: list[int],
    window_bytes: int,
    seconds: float,
    rounds: int,
    ways: tuple[Way, ...] = ("to_device", "to_host", "both"),
    is_batched: tuple[bool, ...] = (False,),
) -> Link:
    """Measures the throughput of a device's copy engines with pinned memory.

    Args:
        ordinal: The device.
        block_bytes: Sizes of copies.
        window_bytes: Memory on either side that is copied repeatedly, per direction.
        seconds: Duration of each measurement.
        rounds: Number of rounds.
        ways: The directions.
        is_batched: Whether one call queues many copies, or one call each; several values are
            measured in turn.
    """
    job = {
        "block_bytes": block_bytes,
        "ways": ways,
        "is_batched": is_batched,
        "window_bytes": window_bytes,
        "seconds": seconds,
        "rounds": rounds,
    }
    found = json.loads(_native.measure_link(ordinal, json.dumps(job)))
    return Link([Rate(**one) for one in found["rates"]], found["unpinned"])


class Pinning(NamedTuple):
    """Seconds spent to pin and unpin memory.

    Attributes:
        bytes: Size of the memory.
        ours_seconds: Pinning as saves and loads do: mapped, touched by threads, registered.
        ours_release_seconds: Releasing that memory.
        driver_seconds: Pinning by the driver alone (``cudaHostAlloc``).
        driver_release_seconds: Releasing that memory.
    """

    bytes: int
    ours_seconds: float
    ours_release_seconds: float
    driver_seconds: float
    driver_release_seconds: float


def pinning(ordinal: int, nbytes: int) -> Pinning:
    """Measures the time to pin memory, once for each method."""
    return Pinning(**json.loads(_native.measure_pinning(ordinal, nbytes)))


class Copies(NamedTuple):
    """The result of copying bytes to a device and back.

    Attributes:
        wrong: ``offset`` and ``is_batched`` of the first byte that changed; None if all are right.
        pinned_bytes: Amount of memory that was pinned at once.
        unpinned: Why memory could not be pinned, in which case pinned memory was not tested; None
            if it was pinned.
    """

    wrong: dict[str, Any] | None
    pinned_bytes: int
    unpinned: str | None


def copies(ordinal: int) -> Copies:
    """Copies bytes to a device and back, and compares them."""
    return Copies(**json.loads(_native.probe_copies(ordinal)))


def posts(ordinal: int, *, warps: int, posts: int) -> float:
    """Measures kernels that post ids to the host, which answers at once without rows.

    Args:
        ordinal: The device.
        warps: Number of warps that post concurrently, each one post after another.
        posts: Number of posts in all.

    Returns:
        Seconds, including the launch.
    """
    return _native.measure_posts(ordinal, warps, posts)


def packing(ordinal: int, *, rows: int, row_bytes: int, count: int) -> float:
    """Measures a kernel that gathers rows of a table in pinned host memory.

    Args:
        ordinal: The device.
        rows: Number of rows of the table.
        row_bytes: Size of one row.
        count: Number of rows gathered, in arbitrary order.

    Returns:
        Seconds, including the launch.
    """
    return _native.measure_packing(ordinal, rows, row_bytes, count)
