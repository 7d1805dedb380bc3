"""A short measurement, compared with a device of the same class."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock import _native
from penstock.common.machine.facts import rotates, transport
from penstock.common.machine.gpus import LANE_GB_PER_SECOND
from penstock.common.machine.kernel import read
from penstock.doctor.findings import Finding
from penstock.doctor.probe import ProbeError, ProbeRequests, measure
from penstock.doctor.storage import device_of, stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZE_BYTES_MAX = 2 << 30
_KIB = 1 << 10
_NEEDED = ("ring", "ext_arg", "nodrop", "read_write_fsync", "transfer")
_SECONDS = 3.0
_SYNCS_MAX = 200


class Expected(NamedTuple):
    """The least that a class of devices should reach.

    Attributes:
        name: The class.
        write_gb: Durable sequential writes, GB/s.
        read_gb: Cold sequential reads, GB/s.
        reads: Random reads of 4 KiB per second, 64 in flight.
        sync_ms: A small durable write, milliseconds.
    """

    name: str
    write_gb: float
    read_gb: float
    reads: float
    sync_ms: float


_ROTATING = Expected("rotating disk", 0.08, 0.08, 60, 60)
_SATA = Expected("SATA flash", 0.25, 0.35, 20_000, 15)
_OTHER = Expected("unknown class", 0.1, 0.1, 2_000, 30)


def expected(device: Path | None) -> Expected:
    """The expected speed of the slowest kind of disk behind a device.

    For an NVMe drive it follows from its link: half of it for reads, a sixth for writes, since the
    flash of small drives is slower than their link, and 80,000 reads per second.
    """
    if device is None:
        return _OTHER
    found = [_expected_of_one(one) for one in stack(device) if not list((one / "slaves").glob("*"))]
    return min(found, key=lambda one: one.read_gb, default=_OTHER)


def _expected_of_one(device: Path) -> Expected:
    kind = transport(device)
    if kind == "nvme":
        for place in (device / "device", *(device / "device").resolve().parents):
            speed, lanes = read(place / "current_link_speed"), read(place / "current_link_width")
            if speed and lanes and lanes.isdecimal():
                lane = LANE_GB_PER_SECOND.get(speed.split()[0], 0.985)
                link = lane * int(lanes)
                return Expected(f"NVMe on {link:.1f} GB/s of PCIe", link / 6, link / 2, 80_000, 5)
        return Expected("NVMe", 0.6, 1.5, 80_000, 5)
    if kind in ("sata", "scsi"):
        return _ROTATING if rotates(device) else _SATA
    return _OTHER


def check(directory: Path, size_bytes: int, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Measures for 10 to 20 s, and removes its files."""
    wanted = expected(device_of(directory))
    work = directory / f".penstock-doctor-{os.getpid()}"

    is_direct = _has_direct(directory)
    method: Literal["uring", "threads"] = "uring" if _has_uring() else "threads"
    trials = [
        (
            "durable write",
            ProbeRequests(is_direct=is_direct, method=method),
            wanted.write_gb,
            "GB/s",
            "saves",
        ),
        (
            "cold read",
            ProbeRequests(pattern="read", is_direct=is_direct, method=method),
            wanted.read_gb,
            "GB/s",
            "loads",
        ),
        (
            "random read of 4 KiB",
            ProbeRequests(
                pattern="random_read",
                is_direct=is_direct,
                method=method,
                block_bytes=4 * _KIB,
                depth=64,
                seconds=_SECONDS,
            ),
            wanted.reads,
            "/s",
            "gathering rows",
        ),
    ]
    for name, requests, least, unit, job in trials:
        progress(name)
        try:
            rates = measure(requests, work, size_bytes)
        except ProbeError as error:
            yield Finding(name, "warn", f"not measured: {error}", f"{job} may fail as well", "")
            continue
        found = rates.requests_per_second if unit == "/s" else rates.gb_per_second
        yield _held_against(name, found, least, unit, job, wanted.name, is_more_better=True)
    progress("sync")
    yield _held_against(
        "sync of 4 KiB", _sync_ms(directory), wanted.sync_ms, "ms", "commits", wanted.name,
        is_more_better=False,
    )  # fmt: skip


def _held_against(
    name: str, found: float, bound: float, unit: str, what: str, kind: str, *, is_more_better: bool
) -> Finding:
    figure = f"{found:,.0f} {unit}" if unit == "/s" else f"{found:.2f} {unit}"
    limit = f"{bound:,.0f} {unit}" if unit == "/s" else f"{bound:.2f} {unit}"
    if (found >= bound) if is_more_better else (found <= bound):
        return Finding(name, "ok", figure)
    return Finding(
        name,
        "warn",
        f"{figure}; {'at least' if is_more_better else 'at most'} {limit} are usual ({kind})",
        f"{what} will be as slow",
        "look for other users of the device (iostat -x 1), a full or worn drive, or limits of a "
        "virtual machine",
    )


def _has_direct(directory: Path) -> bool:
    return bool(_native.probe_directory(str(directory))["is_direct"])


def _has_uring() -> bool:
    tried = {name: text for name, _, text in _native.probe_io_uring()}
    return all(name in tried and tried[name] is None for name in _NEEDED)


def _sync_ms(directory: Path) -> float:
    """Median time of writing 4 KiB and syncing them, in milliseconds."""
    path = directory / f".penstock-doctor-sync-{os.getpid()}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    taken: list[float] = []
    try:
        os.posix_fallocate(descriptor, 0, 1 << 20)
        os.fsync(descriptor)
        end = time.monotonic() + _SECONDS
        while len(taken) < _SYNCS_MAX and time.monotonic() < end:
            began = time.perf_counter()
            os.pwrite(descriptor, b"\x5a" * 4096, len(taken) % 256 * 4096)
            os.fdatasync(descriptor)
            taken.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
        path.unlink()
    return statistics.median(taken) * 1000
