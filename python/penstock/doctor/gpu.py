"""GPUs and GPUDirect Storage: found apart from usable, and none needed."""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.doctor.findings import Finding
from penstock.machine.kernel import read

if TYPE_CHECKING:
    from collections.abc import Iterator

_CUDA = "libcuda.so.1"
_CUFILE = "libcufile.so.0"


def check() -> Iterator[Finding]:
    """All findings about GPUs."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not devices and not Path("/dev/kfd").exists():
        yield Finding("GPU", "ok", "none")
        return
    if not devices:
        yield Finding("GPU", "ok", "AMD: tensors go through host memory")
        return
    count, problem = _usable_gpus()
    if problem is not None:
        yield Finding(
            "GPU",
            "warn",
            f"{len(devices)} found, not usable: {problem}",
            "PyTorch will not see them either",
            "nvidia-smi says more; in a container: docker run --gpus all",
        )
        return
    yield Finding("GPU", "ok", f"{count} usable")
    yield _gds()


def _usable_gpus() -> tuple[int, str | None]:
    """How many GPUs the driver gives to this process, or why none."""
    try:
        cuda = ctypes.CDLL(_CUDA)
    except OSError as error:
        return 0, str(error)
    status = cuda.cuInit(0)
    if status:
        return 0, f"cuInit returned {status}"
    count = ctypes.c_int()
    status = cuda.cuDeviceGetCount(ctypes.byref(count))
    return count.value, f"cuDeviceGetCount returned {status}" if status else None


def _gds() -> Finding:
    try:
        ctypes.CDLL(_CUFILE)
    except OSError:
        return Finding(
            "GPUDirect Storage",
            "ok",
            f"not found: no {_CUFILE}",
            "data goes through host memory",
            "pip install nvidia-cufile",
        )
    if read("/proc/driver/nvidia-fs/version") is None:
        return Finding(
            "GPUDirect Storage",
            "ok",
            "found, not usable: nvidia-fs is not loaded",
            "cuFile falls back to a copy through host memory",
            "modprobe nvidia-fs, or driver 565 and Linux 6.2 for the way without it",
        )
    return Finding("GPUDirect Storage", "ok", "found, nvidia-fs loaded")
