"""Checks GPUs: found, usable, tried, and measured for less than a second. None is needed."""

from __future__ import annotations

import os
import resource
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from penstock.common.machine import gpus
from penstock.doctor import gds
from penstock.doctor.findings import Finding
from penstock.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DEVICES = Path("/dev")
_BLOCK_BYTES = 4 << 20
"""Bytes that saves and loads copy at a time."""
_WINDOW_BYTES = 64 << 20
_SECONDS = 0.05
_ROUNDS = 3
_PART_OF_BUS_MIN = 0.7
"""Least share of the bus's speed; copy engines reach nine tenths."""
_CONFIDENTIAL = (
    "in a guest of confidential computing (nvidia-smi conf-compute -f) save tensors by "
    "PENSTOCK_CUDA_DRIVER=none: PyTorch copies them to the host then"
)


def check(
    directory: Path, *, measures: bool, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Finding]:
    """All findings about GPUs."""
    driver = gpus.probe_driver()
    devices = sorted(_DEVICES.glob("nvidia[0-9]*"))
    if driver.problem is not None:
        yield _without(driver, len(devices))
        return
    for one in driver.gpus:
        yield from _gpu(one, driver.version or "", measures=measures, progress=progress)
    yield from gds.check(directory)


def _without(driver: gpus.Driver, devices: int) -> Finding:
    """The finding when the driver cannot be used."""
    if devices:
        return Finding(
            "GPU",
            "warn",
            f"{devices} found, not usable: {driver.problem}",
            "PyTorch will not see them either",
            "nvidia-smi says more; in a container: docker run --gpus all",
        )
    if (_DEVICES / "kfd").exists():
        return Finding(
            "GPU",
            "ok",
            "AMD: PyTorch copies its tensors to the host and back. What is said of GPUs holds for "
            "NVIDIA's alone",
        )
    if driver.is_found:
        return Finding("GPU", "ok", f"none: {driver.problem}")
    return Finding("GPU", "ok", "none")


def _gpu(
    gpu: gpus.Gpu, version: str, *, measures: bool, progress: Callable[[str], None]
) -> Iterator[Finding]:
    name = f"GPU {gpu.ordinal}"
    if gpu.problem is not None:
        yield Finding(
            name,
            "warn",
            gpu.problem,
            "its tensors cannot be saved or loaded",
            "nvidia-smi says more",
        )
        return
    memory = f"{decimal(gpu.total_bytes)}, {decimal(gpu.free_bytes)} of it free"
    yield Finding(name, "ok", f"{gpu.name}, {memory}, driver for CUDA {version}")
    try:
        yield from _copies(gpu)
        if measures:
            progress(f"the link of {name}")
            yield _link(gpu)
    except DeviceError as error:
        yield Finding(
            f"copies of {name}",
            "fail",
            str(error),
            "its tensors cannot be saved or loaded",
            "dmesg | grep -i xid says what has happened to the GPU; is its memory full?",
        )


def _copies(gpu: gpus.Gpu) -> Iterator[Finding]:
    found = gpus.copies(gpu.ordinal)
    # Pinned memory is shared by all GPUs, so it is checked once.
    if gpu.ordinal == 0:
        yield _pinned(found)
    check = f"copies of GPU {gpu.ordinal}"
    if found.wrong is None:
        yield Finding(check, "ok", "what is copied to it comes back")
        return
    how = "many at a time" if found.wrong["is_batched"] else "by itself"
    yield Finding(
        check,
        "fail",
        f"byte {found.wrong['offset']} of what is copied {how} comes back as another",
        "no call fails: saves would hold garbage",
        _CONFIDENTIAL,
    )


def _pinned(found: gpus.Copies) -> Finding:
    check = "pinned memory"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() == 0:
        limit = resource.RLIM_INFINITY
    if found.unpinned is None:
        told = decimal(found.pinned_bytes)
        if limit != resource.RLIM_INFINITY and limit < found.pinned_bytes:
            told += f", beyond the limit of locked memory ({decimal(limit)}), which does not count"
        return Finding(check, "ok", told)
    remedy = "look at free memory, and at the limit of the control group"
    if limit != resource.RLIM_INFINITY:
        remedy += "; ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return Finding(
        check,
        "warn",
        f"none: {found.unpinned}",
        "copies go through memory of the driver, and the host waits for each: several times slower",
        remedy,
    )


def _link(gpu: gpus.Gpu) -> Finding:
    check = f"link of GPU {gpu.ordinal}"
    if gpu.free_bytes < 4 * _WINDOW_BYTES:
        return Finding(check, "ok", f"not measured: {decimal(gpu.free_bytes)} of the GPU are free")
    found = gpus.link(
        gpu.ordinal,
        block_bytes=[_BLOCK_BYTES],
        window_bytes=_WINDOW_BYTES,
        seconds=_SECONDS,
        rounds=_ROUNDS,
    )
    rates = [statistics.median(found.of(way).gb_per_second) for way in ("to_device", "to_host")]
    both = statistics.median(found.of("both").gb_per_second)
    told = f"{rates[0]:.1f} GB/s to it, {rates[1]:.1f} from it, {both:.1f} both at once"
    bus = gpus.bus_gb_per_second(gpu.pci_bus_id)
    if bus is None or min(rates) >= _PART_OF_BUS_MIN * bus:
        return Finding(check, "ok", told)
    return Finding(
        check,
        "warn",
        f"{told}; its bus has {bus:.1f} GB/s",
        "saves and loads of its tensors will be as slow",
        f"lspci -vvs {gpu.pci_bus_id} (LnkSta beside LnkCap), and who else uses the GPU or its "
        "switch; run on the processors of its NUMA node (nvidia-smi topo -m)",
    )
