"""Limits the memory of processes by a control group."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common.machine.cgroups import cgroup_directories
from penstock.common.machine.kernel import read
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/sys/fs/cgroup")
_REMOVALS_MAX, _AGAIN_SECONDS = 100, 0.05


class LimitError(PenstockError):
    """The memory of processes cannot be limited here."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A control group.

    Attributes:
        processes: The file to which a process writes its id, or 0, to join.
        peak_file: The kernel's file with the group's peak memory.
    """

    processes: Path
    peak_file: Path

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the group, page cache included; None if the kernel does not count it."""
        text = read(self.peak_file)
        return int(text) if text and text.isdecimal() else None


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Limit]:
    """Creates a control group that limits its processes' memory, page cache included, without swap.

    The group is of version 2 below the group of this process, else of version 1. It is removed at
    the end, when its processes must have ended.

    Raises:
        LimitError: The group cannot be created: this needs root, or a delegated group, and a kernel
            that accounts memory.
    """
    directory, names = _made()
    try:
        try:
            (directory / names["limit"]).write_text(str(nbytes))
        except OSError as error:
            raise LimitError(f"{directory}: no limit of memory: {error.strerror}") from error
        # Without a limit for swap there is no swap to use.
        with contextlib.suppress(OSError):
            (directory / names["swap"]).write_text(names["no_swap"].format(nbytes))
        yield Limit(directory / "cgroup.procs", directory / names["peak"])
    finally:
        _remove(directory)


def _made() -> tuple[Path, dict[str, str]]:
    tried = []
    for parent, names in _parents():
        directory = parent / f"penstock-{secrets.token_hex(6)}"
        try:
            directory.mkdir()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        if (directory / names["limit"]).exists():
            return directory, names
        tried.append(f"{parent}: its groups have no limit of memory")
        directory.rmdir()
    raise LimitError("; ".join(tried) or "there are no control groups that count memory")


def _parents() -> list[tuple[Path, dict[str, str]]]:
    """Returns the parents in which groups may be created, by version."""
    second = {
        "limit": "memory.max",
        "peak": "memory.peak",
        "swap": "memory.swap.max",
        "no_swap": "0",
    }
    first = {
        "limit": "memory.limit_in_bytes",
        "peak": "memory.max_usage_in_bytes",
        "swap": "memory.memsw.limit_in_bytes",
        "no_swap": "{}",
    }
    # Except for the root, a group with processes has no subgroups that account memory.
    found = [(place, second) for place in cgroup_directories() if (place / "cgroup.procs").exists()]
    if (_ROOT / "memory").is_dir():
        text = read("/proc/self/cgroup") or ""
        lines = [line.split(":", 2) for line in text.splitlines()]
        own = next((line[2] for line in lines if "memory" in line[1].split(",")), "/")
        found += [(_ROOT / "memory" / own.lstrip("/"), first), (_ROOT / "memory", first)]
    return found


def _remove(directory: Path) -> None:
    """Removes a group; its last process may take a moment to end."""
    for _ in range(_REMOVALS_MAX):
        with contextlib.suppress(OSError):
            os.rmdir(directory)
        if not directory.exists():
            return
        time.sleep(_AGAIN_SECONDS)
