"""Checks the kernel, and what it allows this process."""

from __future__ import annotations

import errno
import os
import platform
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from penstock import _native
from penstock.common.machine.cgroups import cgroup_directories
from penstock.common.machine.kernel import read
from penstock.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMLOCK_BYTES_MIN = 64 << 20
_FILES_MIN = 4096

# The virtio device of the memory balloon, and its feature VIRTIO_BALLOON_F_REPORTING.
_BALLOON = "0x0005"
_REPORTING = 5

_SECCOMP_REMEDY = (
    "run the container with a profile that allows io_uring_setup, io_uring_enter and "
    "io_uring_register (docker run --security-opt seccomp=PROFILE.json, or unconfined)"
)


def check() -> Iterator[Finding]:
    """All findings about the system."""
    yield Finding("kernel", "ok", f"Linux {platform.release()}, {platform.machine()}")
    yield from _io_uring(_native.probe_io_uring())
    yield _lazy_saves(_native.probe_watch())
    yield _memlock()
    yield _open_files()
    yield from _cgroup_memory()
    yield _huge_pages()
    yield from _reported_pages()
    yield _numa()
    yield _iommu()


def _io_uring(trials: list[tuple[str, int | None, str | None]]) -> Iterator[Finding]:
    """Findings about trials: each has a name, and the kernel's error number and text, if any."""
    outcome = {name: (number, text) for name, number, text in trials}
    number, text = outcome["ring"]
    if text is not None:
        yield _refused(number, text)
        return
    failed = outcome["transfer"][1]
    if failed is not None:
        yield Finding(
            "io_uring",
            "warn",
            f"a ring can be made, and cannot read: {failed}",
            "everything goes through threads instead, which takes more processor time",
            _SECCOMP_REMEDY,
        )
        return
    kinds = [name for name in ("defer_taskrun", "coop_taskrun") if outcome[name][1] is None]
    if kinds:
        yield Finding("io_uring", "ok", f"works, with {kinds[0]}")
    else:
        yield Finding(
            "io_uring",
            "warn",
            "works, without deferred completions",
            "completions interrupt the threads that copy",
            "run Linux 6.1 or later",
        )
    _, text = outcome["registered_buffers"]
    if text is not None:
        yield Finding(
            "registered buffers",
            "warn",
            f"refused: {text}",
            "small requests cost more: each has its pages looked up anew",
            "raise the limit of locked memory: ulimit -l unlimited",
        )
    missing = [name for name in ("sqpoll", "iopoll") if outcome[name][1] is not None]
    found = "both can be set up" if not missing else f"not here: {', '.join(missing)}"
    yield Finding("polling", "ok", found)


def _refused(number: int | None, text: str) -> Finding:
    setting = read("/proc/sys/kernel/io_uring_disabled")
    why = "everything goes through threads instead, which takes more processor time"
    if number == errno.EPERM and setting not in (None, "0"):
        return Finding(
            "io_uring",
            "warn",
            f"switched off (kernel.io_uring_disabled={setting})",
            why,
            "sysctl -w kernel.io_uring_disabled=0",
        )
    if number in (errno.EPERM, errno.ENOSYS):
        return Finding("io_uring", "warn", f"forbidden: {text}", why, _SECCOMP_REMEDY)
    return Finding("io_uring", "warn", f"refused: {text}", why, "ulimit -l unlimited")


def _lazy_saves(refusal: str | None) -> Finding:
    """The finding about watching memory for writes; the refusal is None if the kernel can."""
    if refusal is None:
        return Finding("lazy saves", "ok", "the kernel tells of writes to a state")
    return Finding(
        "lazy saves",
        "warn",
        refusal,
        "save_async(lazy=True) copies the whole state at the call, as lazy=False does: a change "
        "before the copy could not be noticed",
        "run Linux 6.7 or later; in a container, a profile that allows userfaultfd and reading "
        "/proc/self/pagemap (docker run --security-opt seccomp=PROFILE.json)",
    )


def _memlock() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_free = limit == resource.RLIM_INFINITY or os.geteuid() == 0
    found = "unlimited" if is_free else f"{limit / (1 << 20):.0f} MiB"
    if is_free or limit >= _MEMLOCK_BYTES_MIN:
        return Finding("locked memory", "ok", found)
    return Finding(
        "locked memory",
        "warn",
        found,
        "buffers beyond it can be neither registered with a ring nor pinned for a GPU",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit, or docker run --ulimit "
        "memlock=-1",
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft}, up to {hard}"
    if soft >= _FILES_MIN or soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", found)
    return Finding(
        "open files",
        "warn" if soft < 1024 else "ok",
        found,
        "a checkpoint of many ranks is read from many files at once",
        "ulimit -n 65536",
    )


def _cgroup_memory() -> Iterator[Finding]:
    limits = [
        int(text)
        for place in cgroup_directories()
        for name in ("memory.max", "memory.high")
        if (text := read(place / name)) and text.isdecimal()
    ]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limits and min(limits) < total:
        yield Finding(
            "memory of the control group",
            "warn",
            f"{decimal(min(limits))} of the machine's {decimal(total)}",
            "the page cache counts as well: buffered saves are throttled, and what exceeds it is "
            "killed",
            "raise memory.max, or keep staging_bytes below what is left",
        )
    else:
        yield Finding("memory", "ok", decimal(total))


def _huge_pages() -> Finding:
    text = read("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Finding("huge pages", "ok", chosen)
    return Finding(
        "huge pages",
        "warn",
        chosen or "not in this kernel",
        "loads into fresh memory take a fault for every 4 KiB: 1.5 GB/s instead of 2.0 measured",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _reported_pages(devices: Path = Path("/sys/bus/virtio/devices")) -> Iterator[Finding]:
    """A finding if the virtual machine gives free memory back to its host."""
    for device in devices.glob("*"):
        features = read(device / "features") or ""
        if read(device / "device") != _BALLOON or features[_REPORTING : _REPORTING + 1] != "1":
            continue
        yield Finding(
            "free memory",
            "warn",
            "the host takes free pages back (free page reporting of the memory balloon)",
            "memory that was free for two seconds takes 1 to 2.3 s/GiB to use, instead of 0.09, "
            "so loads into new memory vary",
            "load(into=) fills memory that is there; or start the virtual machine without "
            "free-page-reporting",
        )
        return


def _numa() -> Finding:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    usable, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{max(1, len(nodes))} NUMA node{'s'[: len(nodes) > 1]}, {usable} of {cores} cores"
    if usable >= 2 or cores == 1:
        return Finding("processors", "ok", found)
    return Finding(
        "processors",
        "warn",
        found,
        "copying, digests and training share one core",
        "taskset, or cpuset.cpus of the control group",
    )


def _iommu() -> Finding:
    groups = list(Path("/sys/kernel/iommu_groups").glob("*/type"))
    kinds = sorted({text for group in groups if (text := read(group))})
    if not groups:
        return Finding("IOMMU", "ok", "off")
    if kinds == ["identity"]:
        return Finding("IOMMU", "ok", "passes through")
    return Finding(
        "IOMMU",
        "ok",
        f"translates ({', '.join(kinds)})",
        "every request has its pages mapped; GPUDirect Storage does not work across it",
        "iommu=pt on the kernel's command line",
    )
