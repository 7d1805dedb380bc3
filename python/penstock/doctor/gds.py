"""Checks GPUDirect Storage: found, usable, or through host memory.

cuFile moves bytes between a file and a GPU past host memory in two ways: with the kernel module
``nvidia-fs``, or with the kernel's own peer-to-peer transfers, which have a list of conditions.
Without either it copies through host memory (compat mode), which Penstock does by itself.
"""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.common.machine import gpus
from penstock.common.machine.facts import transport
from penstock.common.machine.kernel import read
from penstock.doctor.findings import Finding
from penstock.doctor.storage import device_of, stack

if TYPE_CHECKING:
    from collections.abc import Iterator

_SETTINGS = "/etc/cufile.json"
_CHECK = "GPUDirect Storage"
_COMPAT = "compat mode: cuFile copies through memory of the host, as Penstock does by itself"
_DRIVER_MIN = (565, 47)
_KERNEL_MIN = (6, 2)
_REGISTRY = ("RMForceStaticBar1=1", "RmForceDisableIomapWC=1")


class SystemPaths(NamedTuple):
    """The system's files, for tests to replace.

    Attributes:
        root: Prefix of all paths of the kernel and of the system.
    """

    root: Path = Path("/")

    def text(self, path: str) -> str | None:
        """The text of a file; None if it cannot be read."""
        return read(self.root / path.lstrip("/"))


def check(directory: Path, places: SystemPaths | None = None) -> Iterator[Finding]:
    """All findings about GPUDirect Storage."""
    places = places or SystemPaths()
    if gpus.cufile() is None:
        yield Finding(
            _CHECK,
            "ok",
            "not found: no libcufile.so.0. Data goes through memory of the host",
            "",
            "pip install nvidia-cufile",
        )
        return
    settings, problem = _settings(places)
    if problem is not None:
        yield Finding(
            _CHECK,
            "warn",
            f"found; {problem}",
            "cuFile does not start with settings that it cannot read",
            "compare the file with the one that NVIDIA ships",
        )
        return
    properties = settings.get("properties", {})
    module = places.text("/proc/driver/nvidia-fs/version")
    if module is not None:
        version = module.partition(":")[2].strip() or module
        yield Finding(_CHECK, "ok", f"usable: nvidia-fs {version} is loaded")
        return
    missing = list(_missing(directory, places, properties))
    if not missing:
        yield Finding(_CHECK, "ok", "usable: by transfers from peer to peer, without nvidia-fs")
        return
    if properties.get("allow_compat_mode", True) is False:
        yield Finding(
            _CHECK,
            "warn",
            "found, not usable, and cufile.json forbids compat mode",
            "cuFile fails here; Penstock does not use it",
            'set "allow_compat_mode": true, or: modprobe nvidia-fs',
        )
        return
    lacks = "; ".join(missing)
    yield Finding(
        _CHECK,
        "ok",
        f"found, not usable, {_COMPAT}. nvidia-fs is not loaded; and for the way without it: "
        f"{lacks}",
    )


def _settings(places: SystemPaths) -> tuple[dict[str, Any], str | None]:
    """The settings of cuFile, and a problem with them, if any."""
    path = os.environ.get("CUFILE_ENV_PATH_JSON") or _SETTINGS
    text = places.text(path) if path == _SETTINGS else read(path)
    if text is None:
        return {}, None if path == _SETTINGS else f"{path} cannot be read"
    # Removes comments (// to the end of the line), but not slashes in strings.
    bare = re.sub(r'("(?:[^"\\]|\\.)*")|//[^\n]*', lambda match: match[1] or "", text)
    try:
        found = json.loads(bare)
    except ValueError as error:
        return {}, f"{path} is no JSON: {error}"
    if not isinstance(found, dict) or not isinstance(found.get("properties", {}), dict):
        return {}, f"{path} has no properties"
    return found, None


def _missing(directory: Path, places: SystemPaths, properties: dict[str, Any]) -> Iterator[str]:
    """Yields unmet conditions of peer-to-peer transfers, after NVIDIA's guide."""
    if platform.machine() != "x86_64":
        yield "the processor is no x86-64"
    release = platform.release()
    if _numbers(release) < _KERNEL_MIN:
        yield f"Linux {release} is older than 6.2"
    else:
        config = places.text(f"/boot/config-{release}")
        if config is not None and "CONFIG_PCI_P2PDMA=y" not in config:
            yield "the kernel has no PCI_P2PDMA"
    driver = places.text("/proc/driver/nvidia/version") or ""
    if "Open Kernel Module" not in driver:
        yield "the driver is not the open one"
    elif _numbers(driver.partition("Module")[2]) < _DRIVER_MIN:
        yield "the driver is older than 565.47"
    parameters = places.text("/proc/driver/nvidia/params") or ""
    lacking = [one for one in _REGISTRY if one.lower() not in parameters.lower()]
    if lacking:
        yield f"the driver was loaded without {' and '.join(lacking)}"
    if not properties.get("use_pci_p2pdma", False):
        yield 'cufile.json has no "use_pci_p2pdma": true'
    if (places.text("/sys/module/nvme_core/parameters/multipath") or "N") != "N":
        yield "nvme_core.multipath is on"
    groups = (places.root / "sys/kernel/iommu_groups").glob("*/type")
    if any(read(group) != "identity" for group in groups):
        yield "the IOMMU translates (iommu=pt)"
    yield from _disks(directory)


def _disks(directory: Path) -> Iterator[str]:
    device = device_of(directory)
    kinds = {transport(one) for one in stack(device) if not _parts(one)} if device else set()
    if kinds != {"nvme"}:
        yield "the directory is on no NVMe drive"
    elif device is not None and any(read(one / "md/level") for one in stack(device)):
        yield "the drives are an array"


def _parts(device: Path) -> list[Path]:
    return list((device / "slaves").glob("*"))


def _numbers(text: str) -> tuple[int, ...]:
    """The first version number in a text."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
