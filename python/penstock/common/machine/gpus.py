"""GPUs, as the driver that Penstock uses has them: without PyTorch."""

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
"""Of a PCIe lane by its transfers, after the encoding (PCI Express Base Specification)."""

_CUFILE = "libcufile.so.0"
_PCI_DEVICES = Path("/sys/bus/pci/devices")


class Gpu(NamedTuple):
    """One device of the driver.

    Attributes:
        ordinal: Its number in this process.
        name: What its maker calls it.
        pci_bus_id: Where on the bus it is.
        free_bytes: Memory that is free.
        total_bytes: All of its memory.
        problem: Why it cannot be used, if so; the rest is not known then.
    """

    ordinal: int
    name: str
    pci_bus_id: str
    free_bytes: int
    total_bytes: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver, found or not, usable or not.

    Attributes:
        path: Where it is looked for: a path, or a name that the loader knows.
        is_found: Whether there is one.
        version: The version of CUDA that it is made for.
        problem: Why it cannot be used, if so.
        device_count: How many devices it has.
        gpus: Those of them that were looked at.
    """

    path: str
    is_found: bool
    version: str | None
    problem: str | None
    device_count: int
    gpus: list[Gpu]


def look(only: int | None = None) -> Driver:
    """The driver of this process, or the one that ``PENSTOCK_CUDA_DRIVER`` names.

    Args:
        only: The one device to look at; all without, which takes half a second each.
    """
    found = json.loads(_native.probe_gpus(only))
    gpus = [Gpu(**one) for one in found.pop("devices")]
    return Driver(**found, gpus=gpus)


def usable(ordinal: int) -> str | None:
    """Why a device cannot be used here, in words for whoever asked for it; else None."""
    driver = look(ordinal)
    if driver.problem is not None:
        return driver.problem
    if not driver.gpus:
        devices = f"{driver.device_count} device{'s'[: driver.device_count != 1]}"
        return f"the driver has {devices}: there is no cuda:{ordinal}"
    return driver.gpus[0].problem


def cufile() -> str | None:
    """Where cuFile is: a path, or a name that the loader knows; None where it is nowhere.

    What ``PENSTOCK_CUFILE`` names comes first, NVIDIA's package, which PyTorch brings, last.
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
    """What the bus gives a device at most in one direction, GB/s; None where that is not told."""
    place = _PCI_DEVICES / pci_bus_id
    # What it has at the moment is less: a device that does nothing saves power.
    speed, lanes = read(place / "max_link_speed"), read(place / "max_link_width")
    if not speed or not lanes or not lanes.isdecimal():
        return None
    lane = LANE_GB_PER_SECOND.get(speed.split()[0])
    return None if lane is None else lane * int(lanes)


class Rate(NamedTuple):
    """What a link gives to copies of one kind.

    Attributes:
        way: Which way: both count together.
        block_bytes: Of a copy.
        is_batched: Whether they are queued many by one call, or by a call for each.
        gb_per_second: Of each round.
    """

    way: Way
    block_bytes: int
    is_batched: bool
    gb_per_second: list[float]


class Link(NamedTuple):
    """What was measured of a link.

    Attributes:
        rates: In each round each was measured once.
        unpinned: Why memory of the host was not pinned, if so: the rates are of pageable memory.
    """

    rates: list[Rate]
    unpinned: str | None

    def of(self, way: Way) -> Rate:
        """The first of a way."""
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
    """Measures how fast the copy engines of a device are, with pinned memory.

    Args:
        ordinal: The device.
        block_bytes: Sizes of copies.
        window_bytes: Memory on either side that is copied over and over, for each way.
        seconds: How long a figure is measured for.
        rounds: How often.
        ways: Which ways.
        is_batched: Queued by a call for each copy, by one for many, or first one, then the other.

    Raises:
        DeviceError: The device cannot be used, or fails.
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
    """Seconds that pinning memory took.

    Attributes:
        bytes: Of how much.
        ours_seconds: As saves and loads do: mapped, touched by threads, registered.
        ours_release_seconds: Giving it back.
        driver_seconds: By the driver alone (``cudaHostAlloc``).
        driver_release_seconds: Giving that back.
    """

    bytes: int
    ours_seconds: float
    ours_release_seconds: float
    driver_seconds: float
    driver_release_seconds: float


def pinning(ordinal: int, nbytes: int) -> Pinning:
    """Measures what pinning costs, once each way.

    Raises:
        DeviceError: The device cannot be used, or no memory can be pinned.
    """
    return Pinning(**json.loads(_native.measure_pinning(ordinal, nbytes)))


class Copies(NamedTuple):
    """Whether a device copies what it is given.

    Attributes:
        wrong: ``offset`` and ``is_batched`` of the first byte that came back as another; None where
            all is right.
        pinned_bytes: Memory that was pinned at once.
        unpinned: Why it was not, if so: nothing is said of pinned memory then.
    """

    wrong: dict[str, Any] | None
    pinned_bytes: int
    unpinned: str | None


def copies(ordinal: int) -> Copies:
    """Sends bytes to a device and back.

    Raises:
        DeviceError: The device cannot be used, or fails.
    """
    return Copies(**json.loads(_native.probe_copies(ordinal)))


def posts(ordinal: int, *, warps: int, posts: int) -> float:
    """Has kernels post ids that are answered at once, without rows.

    Args:
        ordinal: Which device.
        warps: That post beside each other, each one post after the other.
        posts: Of all of them.

    Returns:
        Seconds that it takes, with the launch.

    Raises:
        DeviceError: The device cannot be used, or no memory can be pinned.
    """
    return _native.measure_posts(ordinal, warps, posts)


def packing(ordinal: int, *, rows: int, row_bytes: int, count: int) -> float:
    """Has a kernel gather rows of a table in pinned memory of the host.

    Args:
        ordinal: Which device.
        rows: Of the table.
        row_bytes: Of each.
        count: How many are gathered, anyhow.

    Returns:
        Seconds that it takes, with the launch.

    Raises:
        DeviceError: The device cannot be used, or there is not so much memory to pin.
    """
    return _native.measure_packing(ordinal, rows, row_bytes, count)
