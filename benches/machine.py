"""The machine that the numbers belong to, and its memory, touched once before the first of them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from benches.states import GIB

PACKAGES = (
    "penstock",
    "torch",
    "numpy",
    "safetensors",
    "torchsnapshot",
    "tensorizer",
    "fastsafetensors",
    "torch-checkpointing",
)

# Environment variables that change what is measured.
_VARIABLES = ("PENSTOCK_", "THP_", "MALLOC_", "OMP_", "TORCH", "FASTSAFETENSORS_", "LD_PRELOAD")
_WARM_TIMES_STATE = 3
_WARM_FRACTION_OF_FREE = 0.7
# What the kernel has reported to the host so far, where it counts that.
_REPORTED = "/sys/module/page_reporting/parameters/reported_kib"
# It reports at most every two seconds, and only what was freed.
_TOUCH = f"""
import numpy, sys, time
memory = numpy.empty(int(sys.argv[1]), numpy.uint8)
began = time.perf_counter()
memory[::4096] = 1
print(time.perf_counter() - began)
def reported():
    try:
        return open({_REPORTED!r}).read()
    except OSError:
        return None
last, since, limit = reported(), time.monotonic(), time.monotonic() + 20
while last is not None and time.monotonic() < min(since + 2.3, limit):
    time.sleep(0.05)
    if reported() != last:
        last, since = reported(), time.monotonic()
"""


def describe(root: Path) -> dict[str, Any]:
    """Machine, kernel and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "architecture": platform.machine(),
        "virtual": _output("systemd-detect-virt"),
        "transparent_huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "io_uring_disabled": _read("/proc/sys/kernel/io_uring_disabled"),
        "root": os.geteuid() == 0,
        "load_average": os.getloadavg(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in PACKAGES},
        "fio": _output("fio", "--version"),
        "revision": _output("git", "-C", str(root), "rev-parse", "HEAD"),
        "modified": bool(_output("git", "-C", str(root), "status", "--porcelain")),
    }


def package_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def touch_memory(nbytes: int) -> float:
    """Touches so much memory in a process of its own and gives it back; returns seconds.

    A virtual machine may report pages that have been free for two seconds to its host, which
    takes them away: the next touch faults there, ten times slower than one in the guest (2.5
    against 0.15 s/GB measured). Whoever follows an operation that used much memory would find it
    cheap and the next one dear, so it is made cheap before each. Where the kernel shows what it
    reports, the memory is held until nothing is reported any more: then two seconds pass before
    what is freed now may be.
    """
    command = [sys.executable, "-c", _TOUCH, str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def warm_memory(state_bytes: int) -> dict[str, float]:
    """Touches memory twice in a process of its own and tells how fast each time was.

    The first touch of a page that a virtual machine was never given faults in its host, which
    is several times slower than later ones: without this the first contender pays for all.
    """
    free = psutil.virtual_memory().available
    nbytes = min(_WARM_TIMES_STATE * state_bytes, int(_WARM_FRACTION_OF_FREE * free))
    seconds = []
    for _ in range(2):
        seconds.append(touch_memory(nbytes))
        time.sleep(0.1)
    return {
        "touched_gib": nbytes / GIB,
        "first_gb_per_second": nbytes / seconds[0] / 1e9,
        "second_gb_per_second": nbytes / seconds[1] / 1e9,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _output(*command: str) -> str | None:
    if not shutil.which(command[0]):
        return None
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
