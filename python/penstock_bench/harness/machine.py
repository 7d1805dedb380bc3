"""The machine and the disk that the numbers belong to, with what the comparison depends on."""

from __future__ import annotations

import os
import platform
import shutil
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import click

from penstock import _native
from penstock.common.machine import facts
from penstock.common.machine.kernel import read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGES = (
    "numpy",
    "penstock",
    "torch",
    "safetensors",
    "torchsnapshot",
    "tensorizer",
    "fastsafetensors",
    "torch-checkpointing",
)
"""Packages whose versions results name: those that save and load, and what they build on."""

# Environment variables that change what is measured, beside those that change Penstock.
_VARIABLES = ("THP_", "OMP_", "TORCH", "FASTSAFETENSORS_")


def describe(root: Path) -> dict[str, Any]:
    """Machine, kernel and versions."""
    found = facts.machine()
    return {
        **found,
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "virtual": facts.output("systemd-detect-virt"),
        "transparent_huge_pages": read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "io_uring_disabled": read("/proc/sys/kernel/io_uring_disabled"),
        "root": found["is_root"],
        "environment": {
            **found["environment"],
            **{k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
        },
        "versions": {name: package_version(name) for name in PACKAGES},
        "revision": facts.output("git", "-C", str(root), "rev-parse", "HEAD"),
        "modified": bool(facts.output("git", "-C", str(root), "status", "--porcelain")),
    }


def disk(directory: Path) -> dict[str, Any]:
    """File system and device of a directory, and what direct I/O there is aligned to."""
    probed = _native.probe_directory(str(directory))
    memory, offset = probed["alignment"]
    alignment = {"memory_bytes": memory, "offset_bytes": offset}
    return {
        **facts.disk(directory),
        "direct_io_alignment": alignment if probed["is_direct"] else None,
    }


def package_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@contextmanager
def workplace(directory: Path, needed_bytes: float) -> Iterator[Path]:
    """A directory of this run alone, removed with all that is in it."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise click.ClickException(
            f"{directory} has {free / 1e9:.1f} GB free, {needed_bytes / 1e9:.1f} are needed: "
            "choose another --directory"
        )
    place = directory / f"run-{os.getpid()}"
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
