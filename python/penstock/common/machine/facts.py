"""Describes the machine, its software and the file system of a directory."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import penstock

_VARIABLES = ("PENSTOCK_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def machine() -> dict[str, Any]:
    """Returns processor, memory, kernel and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "is_root": os.geteuid() == 0,
        "load_average": list(os.getloadavg()),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
        "python": platform.python_version(),
        "penstock": penstock.__version__,
        "numpy": version("numpy"),
        "fio": output("fio", "--version"),
        "command": sys.argv,
    }


def disk(directory: Path) -> dict[str, Any]:
    """Returns the file system and device of a directory."""
    usage = shutil.disk_usage(directory)
    mount = mount_of(directory)
    return {
        "directory": str(directory),
        **mount,
        "size_bytes": usage.total,
        "free_bytes": usage.free,
        "queue": queue_of(directory),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def mount_of(directory: Path) -> dict[str, Any]:
    """Returns the file system of a directory from mountinfo (proc(5))."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found: dict[str, Any] = {"file_system": None, "device": None, "mount_options": None}
    longest = -1
    found["point"] = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        _, _, number, _, point, options, *_ = fields.split(" ")
        kind, source, more = rest.split(" ", 2)
        # Btrfs reports a device number for its files that mountinfo does not list.
        is_above = directory.is_relative_to(point.encode().decode("unicode_escape"))
        if (number == wanted or is_above) and len(point) > longest and is_above:
            longest = len(point)
            found = {
                "file_system": kind,
                "device": source,
                "mount_options": f"{options},{more}",
                "point": point,
            }
    return found


def queue_of(directory: Path) -> dict[str, str]:
    """Returns the settings of the block device's request queue; for a partition, its disk's."""
    device = directory.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    queue = place / "queue"
    if not queue.exists():
        queue = place.resolve().parent / "queue"
    names = (
        "logical_block_size",
        "physical_block_size",
        "scheduler",
        "nr_requests",
        "max_sectors_kb",
        "read_ahead_kb",
        "write_cache",
    )
    if not queue.exists():
        return {}
    found = {"rotational": str(int(rotates(queue.resolve().parent)))}
    return found | {name: _line(queue / name) for name in names if (queue / name).exists()}


def transport(device: Path) -> str:
    """Returns how a disk is attached: nvme, virtio and so on."""
    path = str(device.resolve())
    for word, name in (
        ("/nvme", "nvme"),
        ("/virtio", "virtio"),
        ("/ata", "sata"),
        ("/usb", "usb"),
        ("/loop", "loop"),
        ("/md", "raid"),
        ("/dm-", "mapper"),
        ("/mmc", "mmc"),
        ("/host", "scsi"),
    ):
        if word in path:
            return name
    return "unknown"


_VIRTUAL = frozenset({"loop", "mapper", "raid", "virtio"})
_VIRTUAL_VENDORS = frozenset({"QEMU", "Msft", "VMware", "VBOX", "Google"})


def rotates(disk: Path) -> bool:
    """Whether saves and loads treat a disk as rotating.

    A virtual disk reports itself as rotating unless its host says otherwise, whatever its storage,
    so its report is ignored (`crates/io/src/device.rs` has the same rule).
    """
    if transport(disk) in _VIRTUAL or _line(disk / "device/vendor") in _VIRTUAL_VENDORS:
        return False
    return _line(disk / "queue/rotational") == "1"


def _line(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def output(*command: str) -> str | None:
    """Returns the output of a program; None if it is not installed."""
    if not shutil.which(command[0]):
        return None
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
