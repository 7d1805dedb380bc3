"""Checks the directory: its file system, free space, and the devices behind it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from penstock import _native
from penstock.common.machine.cgroups import cgroup_directories
from penstock.common.machine.facts import mount_of, rotates, transport
from penstock.common.machine.kernel import read
from penstock.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_FREE_BYTES_MIN = 2 << 30
_FREE_PART_MIN = 0.1

_ELSEWHERE = (
    "choose a directory on another file system; a mounted bucket is saved to by its URL "
    "(s3://, gs://, az://)"
)

_MEMORY = frozenset({"tmpfs", "ramfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "glusterfs"}
)


def check(directory: Path) -> Iterator[Finding]:
    """All findings about a directory."""
    mount = mount_of(directory)
    yield from _file_system(mount)
    yield _room(directory)
    yield from _names(directory)
    yield from _direct(directory)
    yield from _devices(directory)


def _file_system(mount: dict[str, Any]) -> Iterator[Finding]:
    kind, options = str(mount["file_system"]), str(mount["mount_options"]).split(",")
    found = f"{kind} on {mount['device']}"
    if kind in _MEMORY:
        yield Finding(
            "file system",
            "warn",
            found,
            "it is memory: no checkpoint here outlives the machine, and what is stored counts as "
            "used memory",
            "choose a directory on a disk",
        )
    elif kind in _NETWORK or kind.startswith("fuse"):
        yield Finding(
            "file system",
            "warn",
            found,
            "locks hold on one host only: leftovers of saves that died are not swept here",
            "call CheckpointStore.sweep on a local file system, or remove them by hand",
        )
    elif kind == "overlay":
        yield Finding(
            "file system",
            "warn",
            found,
            "the writable layer of a container goes with the container",
            "mount a volume: docker run -v /fast/disk:/checkpoints",
        )
    else:
        yield Finding("file system", "ok", found)
    if "ro" in options:
        yield Finding(
            "mount",
            "fail",
            "read only",
            "nothing can be saved",
            f"mount -o remount,rw {mount['point']}",
        )
    if {"nobarrier", "barrier=0"} & set(options):
        yield Finding(
            "mount",
            "fail",
            "without write barriers",
            "a power cut takes acknowledged checkpoints away, unless every cache has a battery",
            f"mount -o remount,barrier {mount['point']}",
        )
    if "data=journal" in options:
        yield Finding(
            "mount",
            "warn",
            "data goes through the journal",
            "every byte is written twice, and direct I/O is off",
            "mount with data=ordered",
        )
    if {"sync", "dirsync"} & set(options):
        yield Finding(
            "mount",
            "warn",
            "synchronous",
            "every write waits for the device by itself",
            f"mount -o remount,async {mount['point']}",
        )


def _room(directory: Path) -> Finding:
    usage = shutil.disk_usage(directory)
    found = f"{decimal(usage.free)} free of {decimal(usage.total)}"
    stat = os.statvfs(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding(
            "room",
            "fail",
            f"{found}, not writable for this user",
            "nothing can be saved",
            f"chown or chmod {directory}, or choose another directory",
        )
    if stat.f_files and stat.f_favail < 1000:
        return Finding(
            "room", "fail", f"{stat.f_favail} inodes free", "no files can be made", "remove files"
        )
    if usage.free < _FREE_BYTES_MIN:
        return Finding(
            "room",
            "fail",
            found,
            "the next save will find no room",
            "penstock sweep removes leftovers; keep_last= keeps fewer steps",
        )
    if usage.free < _FREE_PART_MIN * usage.total:
        return Finding(
            "room",
            "warn",
            found,
            "file systems and flash drives get slow when they are nearly full",
            "penstock sweep removes leftovers; keep_last= keeps fewer steps",
        )
    return Finding("room", "ok", found)


def _names(directory: Path) -> Iterator[Finding]:
    """Checks operations on names: links, renames, syncs, with which a checkpoint is committed."""
    try:
        trials = _native.probe_names(str(directory))
    except OSError as error:
        yield Finding("names", "fail", str(error), "nothing can be saved", "see the findings above")
        return
    lacking = {name: why for name, _, why in trials if why is not None}
    works = ", ".join(name for name, _, _ in trials if name not in lacking)
    if "sync of a directory" in lacking:
        yield Finding(
            "names",
            "fail",
            f"no sync of a directory ({lacking['sync of a directory']})",
            "every save fails: nothing makes a name survive a crash",
            _ELSEWHERE,
        )
    if "link" not in lacking:
        yield Finding("names", "ok", works)
    elif "rename without replacing" in lacking:
        yield Finding(
            "names",
            "fail",
            f"no hard links ({lacking['link']}), no rename without replacing",
            "nothing keeps two saves of one checkpoint apart: a save fails unless it has "
            "overwrite=True, and state in files (penstock.offload.AdamW, SGD) is refused",
            _ELSEWHERE,
        )
    else:
        yield Finding(
            "names",
            "warn",
            f"no hard links ({lacking['link']}); {works}",
            "checkpoints appear by a rename that replaces nothing; files are copied into them "
            "instead of linked, and state in files (penstock.offload.AdamW, SGD) is refused",
            "for that, choose a directory on ext4, XFS or Btrfs",
        )


def _direct(directory: Path) -> Iterator[Finding]:
    try:
        found = _native.probe_directory(str(directory))
    except OSError as error:
        yield Finding(
            "direct I/O", "fail", f"no file can be made: {error.strerror}", "nothing can be saved",
            "see the findings above",
        )  # fmt: skip
        return
    if found["is_direct"]:
        memory, offset = found["alignment"]
        yield Finding(
            "direct I/O", "ok", f"works, aligned to {offset} in files, {memory} in memory"
        )
    else:
        yield Finding(
            "direct I/O",
            "warn",
            f"does not work: {found['fallback']}",
            "everything is copied through the page cache, at half the speed or less",
            "choose a directory on ext4 or XFS",
        )
    if not found["allocates"]:
        yield Finding(
            "allocation",
            "warn",
            "space cannot be reserved",
            "a full disk shows in the middle of a save, and writes find their blocks one by one",
            "choose a directory on ext4, XFS or Btrfs",
        )


def device_of(directory: Path) -> Path | None:
    """The disk, array or volume behind a directory, in /sys; None if there is none."""
    number = directory.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not place.exists():
        # Btrfs and others give their files a device number of their own.
        source = str(mount_of(directory)["device"])
        place = Path("/sys/class/block") / os.path.basename(os.path.realpath(source))
    if not place.exists():
        return None
    resolved = place.resolve()
    return resolved.parent if (resolved / "partition").exists() else resolved


def stack(device: Path) -> Iterator[Path]:
    """Yields a device and all devices below it."""
    yield device
    for below in sorted((device / "slaves").glob("*")):
        resolved = below.resolve()
        yield from stack(resolved.parent if (resolved / "partition").exists() else resolved)


def _devices(directory: Path) -> Iterator[Finding]:
    device = device_of(directory)
    if device is None:
        yield Finding("device", "ok", "none that can be seen")
        return
    for one in stack(device):
        yield from _device(one)
        yield from _limits(one)


def _device(device: Path) -> Iterator[Finding]:
    name, kind = device.name, transport(device)
    queue = device / "queue"
    facts = [kind]
    model = read(device / "device/model") or read(device / "device/device/model")
    if model:
        facts.insert(0, model)
    if rotates(device):
        yield Finding(
            f"device {name}",
            "warn",
            f"{', '.join(facts)}, rotating",
            "a rotating disk has a twentieth of the speed of flash",
            "choose a directory on a flash drive",
        )
        return
    queues = len(list((device / "mq").glob("*")))
    if queues:
        facts.append(f"{queues} queue{'s'[: queues > 1]}")
    cache = read(queue / "write_cache")
    if cache:
        facts.append(f"{cache} cache")
    if kind == "nvme":
        poll = read("/sys/module/nvme/parameters/poll_queues")
        facts.append(f"{poll or 0} poll queues")
    yield Finding(f"device {name}", "ok", ", ".join(facts))
    yield from _scheduler(name, kind, queue)
    yield from _link(name, device)
    yield from _array(name, device)


def _scheduler(name: str, kind: str, queue: Path) -> Iterator[Finding]:
    text = read(queue / "scheduler") or ""
    chosen = text.partition("[")[2].partition("]")[0]
    if kind == "nvme" and chosen not in ("", "none"):
        yield Finding(
            f"scheduler of {name}",
            "warn",
            chosen,
            "an NVMe drive sorts its requests itself: a scheduler only takes processor time",
            f"echo none > /sys/block/{name}/queue/scheduler",
        )


def _link(name: str, device: Path) -> Iterator[Finding]:
    for place in (device / "device", *(device / "device").resolve().parents):
        speed = read(place / "current_link_speed")
        if speed is None:
            continue
        fastest = read(place / "max_link_speed")
        lanes, most = read(place / "current_link_width"), read(place / "max_link_width")
        found = f"{speed} x {lanes}"
        if (speed, lanes) == (fastest, most):
            yield Finding(f"PCIe link of {name}", "ok", found)
        else:
            yield Finding(
                f"PCIe link of {name}",
                "warn",
                f"{found}, of {fastest} x {most}",
                "the link is slower than the drive",
                "move the drive to a slot that has all lanes, or look at its power saving",
            )
        return


def _array(name: str, device: Path) -> Iterator[Finding]:
    level = read(device / "md/level")
    if level is not None:
        disks, degraded = read(device / "md/raid_disks"), read(device / "md/degraded")
        chunk = int(read(device / "md/chunk_size") or 0)
        found = f"{level} of {disks}, chunks of {chunk >> 10} KiB"
        if degraded not in (None, "0"):
            yield Finding(
                f"array {name}",
                "fail",
                f"{found}, {degraded} missing",
                "the next disk that fails may take the checkpoints along",
                f"mdadm --detail /dev/{name}, then mdadm --add",
            )
        else:
            yield Finding(f"array {name}", "ok", found)
    identity = read(device / "dm/uuid")
    if identity is not None:
        what = identity.partition("-")[0] or "mapped"
        below = len(list((device / "slaves").glob("*")))
        yield Finding(f"volume {name}", "ok", f"{what} over {below} device{'s'[: below > 1]}")


def _limits(device: Path) -> Iterator[Finding]:
    number = read(device / "dev")
    for place in cgroup_directories():
        for line in (read(place / "io.max") or "").splitlines():
            found, _, limits = line.partition(" ")
            set_ones = [word for word in limits.split() if not word.endswith("=max")]
            if found == number and set_ones:
                yield Finding(
                    f"control group on {device.name}",
                    "warn",
                    ", ".join(set_ones),
                    "the kernel holds this process to that, whatever the device can do",
                    f"echo '{number} rbps=max wbps=max riops=max wiops=max' > {place}/io.max",
                )
