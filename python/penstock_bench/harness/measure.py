"""The cost of a call: time, processor time of the process and of the machine, peak memory."""

from __future__ import annotations

import gc
import resource
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Cost:
    """The cost of the block under `measured`, complete when the block has ended.

    Attributes:
        seconds: Wall time.
        cpu_seconds: User and system time of the process, its threads and its children.
        machine_cpu_seconds: Busy time of all processors. It holds what the kernel does for the
            process in threads of its own, above all writing back the page cache, which
            ``cpu_seconds`` cannot see; and also whatever else ran meanwhile.
        peak_growth_bytes: How far the resident set rose above where it was.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    machine_cpu_seconds: float = 0.0
    peak_growth_bytes: int = 0

    @property
    def times(self) -> dict[str, float]:
        """The times by name."""
        names = ("seconds", "cpu_seconds", "machine_cpu_seconds")
        return {name: getattr(self, name) for name in names}


@contextmanager
def measured() -> Iterator[Cost]:
    """Measures the block."""
    cost = Cost()
    gc.collect()
    # Sets the peak of the resident set back to what it is now.
    Path("/proc/self/clear_refs").write_text("5")
    resident_bytes = memory_bytes()["VmRSS"]
    machine = _machine_cpu_seconds()
    cpu = cpu_seconds()
    began = time.perf_counter()
    yield cost
    cost.seconds = time.perf_counter() - began
    cost.cpu_seconds = cpu_seconds() - cpu
    cost.machine_cpu_seconds = _machine_cpu_seconds() - machine
    cost.peak_growth_bytes = max(0, memory_bytes()["VmHWM"] - resident_bytes)


def cpu_seconds() -> float:
    """Processor time of the process, its threads and the children that have ended."""
    usages = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _machine_cpu_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + times.irq + times.softirq)


def memory_bytes(process: int | str = "self") -> dict[str, int]:
    """The kernel's figures of the memory of a process (``VmRSS`` and so on, proc(5)), in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    sizes = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, _ in sizes}
