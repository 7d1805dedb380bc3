"""Hits of caches of several sizes by policy, from a trace: no byte is read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import _native
from penstock.features import rank
from penstock_bench.peers.gather import policies
from penstock_bench.results.results import Measurement
from penstock_bench.suites.gather.cases import (
    ALL,
    BELADY,
    POLICIES,
    REFERENCE,
    SIEVE,
    Plan,
    cached_trace,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_bench.results.results import Results

PARTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""The parts of the table that are kept."""
WINDOWS = (1, 8, 64)

_Array = np.ndarray[Any, Any]


def replay(plan: Plan, results: Results, progress: Callable[[str], object]) -> None:
    """Asks each policy for the ids of the trace that caches serve, with caches of each size."""
    ids = cached_trace(plan, is_permuted=True).ids()
    keys = np.ascontiguousarray(ids.reshape(-1), np.uint64)
    for part in PARTS:
        slots = max(1, round(part * plan.rows))
        case = f"{POLICIES}, {part:.0%}"
        results.cases[case] = {"pattern": POLICIES, "part": part, "slots": slots}
        for by, hits in _replays(keys, slots, plan.batch_rows, len(ids)).items():
            progress(f"{case}: {by}")
            begun = time.perf_counter()
            found = hits()
            results.measurements.append(
                Measurement(
                    case=case,
                    by=by,
                    round_index=0,
                    seconds=time.perf_counter() - begun,
                    rows=len(keys),
                    hits=found,
                )
            )


def _replays(
    keys: _Array, slots: int, batch_rows: int, batches: int
) -> dict[str, Callable[[], int]]:
    """A function for each policy that counts its hits."""

    def ours(policy: str, window: int) -> Callable[[], int]:
        return lambda: _native.RowIndex(slots, policy).replay(_array(keys), batch_rows, window)

    def static() -> int:
        """The rows that are asked for most, as if that had been known."""
        index = _native.RowIndex(slots, "static")
        counted = np.bincount(keys.astype(np.int64))
        hot = rank(by="counts", counts=counted, top=slots).astype(np.uint64)
        index.pin(_array(hot))
        return index.replay(_array(keys), batch_rows, 0)

    def theirs(make: Callable[[], policies.Policy]) -> Callable[[], int]:
        return lambda: len(keys) - policies.misses(make(), keys.tolist())

    return {
        SIEVE: ours("sieve", 0),
        REFERENCE: theirs(lambda: policies.Sieve(slots)),
        "s3fifo": ours("s3fifo", 0),
        "static": static,
        **{f"window {window}": ours("sieve", window) for window in WINDOWS},
        ALL: ours("sieve", batches),
        BELADY: theirs(lambda: policies.Belady(slots, keys)),
    }


def _array(keys: _Array) -> Any:
    return keys.ctypes.data, (keys.size,), None, keys.itemsize, keys
