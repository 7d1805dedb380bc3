"""Notes that a reader has to know before believing the figures of saves and loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

if TYPE_CHECKING:
    from penstock_bench.results.samples import Samples

_OTHERS_WORK_MAX = 0.1
"""Share of the processors that other work may have before the figures are called in question."""
_RESIDENT_MAX = 0.001
_OURS = ("penstock", "penstock-threads", "penstock-buffered")


def doubts(results: Samples[Any], state: str) -> list[Text]:
    """The notes on the figures of a state."""
    samples = [one for one in results.samples if one.state == state and one.error is None]
    found = _of_the_machine(samples, results.machine["cores"])
    for row in _OURS:
        for one in results.good(row, state=state, operation="save")[:1]:
            report = one.detail
            found.append(
                f"{row} ran with engine {report['engine']}, direct I/O "
                f"{'on' if report['direct_io'] else 'off'}, {report['io_threads']} threads x "
                f"{report['queue_depth']} x {report['extent_bytes'] >> 20} MiB"
                + "".join(f"; {reason}" for reason in report["fallbacks"])
            )
    return [Text(f"  {line}", style="yellow") for line in found]


def _of_the_machine(samples: list[Any], cores: int) -> list[str]:
    """Files that were still cached, and other work that took the processors."""
    found = []
    warm = [one for one in samples if (one.resident_fraction or 0.0) > _RESIDENT_MAX]
    if warm:
        worst = max(one.resident_fraction for one in warm)
        rows = ", ".join(dict.fromkeys(one.row for one in warm))
        found.append(f"up to {worst:.1%} of the files was still cached before loads of {rows}")
    # Loads alone: during saves the kernel's write-back, which no process counts, looks like the
    # work of others.
    shares = [
        (one.machine_cpu_seconds - one.cpu_seconds) / one.seconds / cores
        for one in samples
        if one.operation == "load" and one.machine_cpu_seconds
    ]
    if shares and np.median(shares) > _OTHERS_WORK_MAX:
        found.append(
            f"THE MACHINE WAS BUSY: {np.median(shares):.0%} of its processors' time during loads "
            "went to other work"
        )
    if any(one.dropped == "fadvise" for one in samples):
        found.append("not root: caches dropped with posix_fadvise alone")
    return found
