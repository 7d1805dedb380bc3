"""Checks how fast this machine seals, and where it would write memory that holds secrets."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

from penstock.common.machine.kernel import read
from penstock.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_AES = frozenset({"aes"})
_MULTIPLICATION = frozenset({"pclmulqdq", "pmull"})
"""The instruction of the tags' multiplication on x86 and on ARM."""
_WIDE = frozenset({"vaes", "vpclmulqdq"})

_STATE_IN_MEMORY = (
    "Penstock keeps its keys out of it, and cannot keep a model's tensors out: they matter where "
    "checkpoints are sealed"
)


def check() -> Iterator[Finding]:
    """All findings about sealed checkpoints."""
    yield _aes()
    yield _entropy()
    yield _swap()
    yield _core_dumps()


def _aes() -> Finding:
    flags = _processor_flags()
    if not flags:
        return Finding("AES instructions", "ok", "not known: /proc/cpuinfo lists no features")
    if flags >= _AES and flags & _MULTIPLICATION:
        width = ", several blocks at once" if flags >= _WIDE else ""
        return Finding("AES instructions", "ok", "of the processor" + width)
    return Finding(
        "AES instructions",
        "warn",
        "none",
        "sealing takes some ten times as much processor time, and its time may depend on keys",
        "let the virtual machine see its host's processor (qemu: -cpu host)",
    )


def _processor_flags() -> frozenset[str]:
    """Features of the first processor that /proc/cpuinfo lists."""
    for line in (read("/proc/cpuinfo") or "").splitlines():
        name, _, features = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(features.split())
    return frozenset()


def _entropy() -> Finding:
    try:
        os.getrandom(32, os.GRND_NONBLOCK)
    except BlockingIOError:
        return Finding(
            "random numbers",
            "warn",
            "the kernel has no entropy yet",
            "a sealed save waits until there is some",
            "start rngd, or give the virtual machine a virtio-rng device",
        )
    except OSError as error:
        return Finding(
            "random numbers",
            "warn",
            f"getrandom is refused: {error.strerror}",
            "sealed saves fail: keys cannot be drawn",
            "run the container with a profile that allows getrandom",
        )
    return Finding("random numbers", "ok", "the kernel's generator is ready")


def _swap() -> Finding:
    areas = [line.split()[0] for line in (read("/proc/swaps") or "").splitlines()[1:]]
    disks = [area for area in areas if not area.startswith("/dev/zram")]
    if not disks:
        return Finding("swap", "ok", "in memory only" if areas else "none")
    return Finding(
        "swap",
        "ok",
        ", ".join(disks),
        f"memory may be written to it: {_STATE_IN_MEMORY}",
        "swapoff -a, or encrypt the swap",
    )


def _core_dumps() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_CORE)
    pattern = read("/proc/sys/kernel/core_pattern") or ""
    # The limit does not hold for a program that takes dumps: core(5).
    if pattern.startswith("|"):
        found = f"taken by {pattern[1:].split()[0]}"
    elif limit:
        found = "written to files"
    else:
        return Finding("core dumps", "ok", "off")
    return Finding(
        "core dumps",
        "ok",
        found,
        f"a dump holds memory: {_STATE_IN_MEMORY}",
        "sysctl -w kernel.core_pattern=core, and ulimit -c 0",
    )
