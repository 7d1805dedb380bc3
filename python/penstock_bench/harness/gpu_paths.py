"""The paths of bytes between storage and a GPU, by the names that gdsio gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_bench.harness.cases import Case

DIRECT = "GPUD"
HOST = "CPUONLY"
COPIED = "CPU_GPU"
OVERLAPPED = "CPU_ASYNC_GPU"
CACHED = "CPU_CACHED_GPU"
COMPAT = "GPUD, compat"
UNKNOWN = "GPUD, untold"

PATHS = {
    DIRECT: "storage, GPU: past memory of the host (gdsio -x 0)",
    HOST: "storage, memory of the host: no GPU (gdsio -x 1)",
    COPIED: "storage, memory of the host, GPU: each copy waited for (gdsio -x 2)",
    OVERLAPPED: "storage, pinned memory, GPU: copies while others are under way (gdsio -x 3)",
    CACHED: "storage, page cache, pinned memory, GPU (gdsio -x 4)",
    COMPAT: "storage, memory of the host, GPU: cuFile in compat mode, by its own counters",
    UNKNOWN: "cuFile does not tell which way it went: it has no counters (before 1.15)",
}
"""The meaning of each path, from or to storage."""


def of_ours(case: Case, is_direct: bool, counts: list[dict[str, int] | None]) -> str:
    """The path that requests of Penstock took.

    Args:
        case: What was measured, with a GPU.
        is_direct: Whether the page cache was passed by.
        counts: Of cuFile, what it counted in each process; None where it does not count.
    """
    if case.method == "cufile":
        if None in counts:
            return UNKNOWN
        return COMPAT if any(one["by_host"] for one in counts if one) else DIRECT
    if not is_direct:
        return CACHED
    return COPIED if case.method == "posix" else OVERLAPPED
