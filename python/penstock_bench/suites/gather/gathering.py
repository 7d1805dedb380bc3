"""A process that gathers rows: ``python -m penstock_bench.suites.gather.gathering``.

It joins the control group of its job before it imports anything large, so that all of its memory
counts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock_bench.harness.child import answer, io_counts, join, peak_bytes, read_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from penstock_bench.peers.gather.base import Gatherer


def main() -> None:
    """Does what standard input says."""
    job = read_job()
    join(job["group"])
    from penstock_bench.harness.running import described

    try:
        found = done(job)
    except Exception as error:
        found = {"error": described(error)}
    answer(found)


def done(job: dict[str, Any]) -> dict[str, Any]:
    """Does a job and returns its figures."""
    import numpy as np

    from penstock_bench.peers.gather import GATHERERS
    from penstock_bench.peers.gather.base import Setting

    gatherer = GATHERERS[job["by"]].make()
    setting = Setting(**job["setting"])
    batches = list(np.load(job["trace"]))
    if job["is_preparing"]:
        gatherer.prepare(setting, batches)
        return {}
    begun = time.perf_counter()
    gatherer.open(setting, batches)
    opened = time.perf_counter() - begun
    if job["is_warm"]:
        for _ in gatherer.gather(batches):
            pass
    found = _gathered(gatherer, setting.row_bytes, batches, job["seconds_max"])
    return {"open_seconds": opened, **found, **gatherer.report()}


def _gathered(
    gatherer: Gatherer,
    row_bytes: int,
    batches: Sequence[np.ndarray[Any, Any]],
    seconds_max: float | None,
) -> dict[str, Any]:
    """Times it. Both ends of every row are compared, and all of the last batch."""
    from penstock_bench.workloads import row_content

    ends = [row_content.ends_of(ids, row_bytes) for ids in batches]
    counts, used, cpu = gatherer.counts(), io_counts(), time.process_time()
    count, rows, seconds = 0, 0, 0.0
    last = ids = wrong = None
    begun = time.perf_counter()
    for last in gatherer.gather(batches):
        ids = batches[count]
        # Two words of each row are next to nothing beside the row, and everybody pays for them.
        wrong = row_content.first_wrong(last[:, :: last.shape[1] - 1], ends[count], ids)
        count, rows = count + 1, rows + len(ids)
        seconds = time.perf_counter() - begun
        if wrong or (seconds_max is not None and seconds >= seconds_max):
            break
    cpu_seconds, after = time.process_time() - cpu, io_counts()
    later = gatherer.counts()
    if last is None or ids is None:
        raise ValueError("no batch came")
    wrong = wrong or row_content.first_wrong(last, row_content.rows_of(ids, row_bytes), ids)
    if wrong:
        raise ValueError(f"batch {count - 1}: {wrong}")
    if seconds_max is None and count != len(batches):
        raise ValueError(f"{count} of {len(batches)} batches came")
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rows": rows,
        "read_bytes": after["read_bytes"] - used["read_bytes"],
        "memory_peak_bytes": peak_bytes(),
        **{name: value - counts.get(name, 0) for name, value in later.items()},
    }


if __name__ == "__main__":
    main()
