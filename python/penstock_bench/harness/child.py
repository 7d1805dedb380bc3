"""The other side of `running.run_module`: a job on standard input, an answer on the last line.

Imports nothing large: a process joins its control group before it imports libraries, so that all of
its memory counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def read_job() -> dict[str, Any]:
    """The job that standard input holds."""
    job: dict[str, Any] = json.loads(sys.stdin.read())
    return job


def answer(found: dict[str, Any]) -> None:
    """Prints what came of a job, on a line of its own: libraries print before it."""
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()


def join(group: str | None) -> None:
    """Counts this process to a control group from now on.

    The group is the file of its processes; None for no group.
    """
    if group is not None:
        Path(group).write_text("0")


def io_counts() -> dict[str, int]:
    """The kernel's counts of this process's I/O: ``read_bytes`` are those of storage."""
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in pairs}


def peak_bytes() -> int:
    """The most memory that was resident at a time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
