"""The cases of gathering: tables, traces of ids, and the libraries that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock_bench.peers import gather as peers
from penstock_bench.workloads.traces import Law, Trace

if TYPE_CHECKING:
    from pathlib import Path

DENSE_ROW_BYTES, DENSE_PART = 512, 0.05
_COLD_BATCHES = 8
"""A batch of ``cold`` is as large as so many others."""
_CACHED_TIMES = 4
"""A trace that caches serve is so many times as long: they have to be full for most of it."""
_HOT_BATCHES, _HOT_TIMES = 8, 16
"""A trace of rows in memory has so many batches of its own, and is so many times as long."""
_SLOT_BYTES = 256
"""More than what a cache of ours knows of a row."""

PEERS = ("memmap", "mmap-random", "torch-mmap", "lmdb", "rocksdict", "lance")
EMULATED = ("graphbolt", "ginex", "gids")


@dataclass(slots=True, kw_only=True)
class Plan:
    """The measurements to make.

    Names are those of `GATHERERS`, or None for those that each case is for. The law and the
    recurring part of a batch, its seeds, are those of traces that caches serve; who waits for
    one row after the other has only some seconds.
    """

    work: Path
    rows: int
    row_bytes: int
    cases: list[str]
    names: list[str] | None
    rounds: int
    batches: int
    batch_rows: int
    cache_bytes: int
    limit_bytes: int
    law: Law
    recurring: float
    seconds_max: float
    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """A table."""

    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of them.

    Attributes:
        name: Its name, which labels what is measured.
        note: What is asked for.
        table: Which one: ``"rows"`` or ``"dense"``.
        names: Who is measured.
        fio: What fio does beside: ``"random"``, ``"scan"`` or nothing.
        is_cached: Whether rows are kept in memory.
        is_warm: Whether all of the trace is gathered once before, not timed; then memory is not
            limited.
    """

    name: str
    note: str
    names: tuple[str, ...]
    table: str = "rows"
    fio: str = ""
    is_cached: bool = False
    is_warm: bool = False

    def trace(self, plan: Plan) -> Trace:
        """The ids to gather; a warm case repeats them."""
        size = table_size(plan, self.table)
        if self.is_cached and not self.is_warm:
            return cached_trace(plan, is_permuted=self.name != ORDERED)
        rows, batches, batch_rows = size.rows, plan.batches, plan.batch_rows
        if self.table == "dense":
            batches, batch_rows = 1, max(1, int(size.rows * DENSE_PART))
        elif self.is_warm:
            batches = max(1, min(_HOT_BATCHES, rows // batch_rows))
            rows = min(rows, batches * batch_rows)
        elif self.name == COLD:
            batches, batch_rows = max(1, batches // _COLD_BATCHES), batch_rows * _COLD_BATCHES
        return Trace(law="uniform", rows=rows, batches=batches, batch_rows=batch_rows)

    def ids(self, plan: Plan) -> np.ndarray[Any, Any]:
        """The same as ids, a batch a row; a warm case asks again and again."""
        found = self.trace(plan).ids()
        times = -(-_HOT_TIMES * plan.batches // len(found)) if self.is_warm else 1
        return np.tile(found, (times, 1))

    def cache_bytes(self, plan: Plan) -> int:
        """Memory for rows that are kept; all of those that a warm case asks for fit."""
        if self.is_warm:
            return _HOT_BATCHES * plan.batch_rows * (plan.row_bytes + _SLOT_BYTES)
        return plan.cache_bytes if self.is_cached else 0


def cached_trace(plan: Plan, *, is_permuted: bool) -> Trace:
    """The trace that caches serve."""
    return Trace(
        law=plan.law,
        rows=plan.rows,
        batches=plan.batches * _CACHED_TIMES,
        batch_rows=plan.batch_rows,
        recurring=plan.recurring,
        is_permuted=is_permuted,
    )


def table_size(plan: Plan, table: str) -> TableSize:
    """The size of a table; that of the dense one is half of the other one's, in bytes."""
    if table == "rows":
        return TableSize(rows=plan.rows, row_bytes=plan.row_bytes)
    rows = max(ROWS_STEP, plan.rows * plan.row_bytes // 2 // DENSE_ROW_BYTES)
    return TableSize(rows=rows // ROWS_STEP * ROWS_STEP, row_bytes=DENSE_ROW_BYTES)


ROWS_STEP = 512
"""Rows of a table are a multiple of it, so that they end with a block of the file."""

FIO, FIO_POOL = "fio", "fio-pread"
"""Beside who gathers: fio at its best, and fio with a pool of threads."""
BELADY, SIEVE, REFERENCE, ALL = "belady", "sieve", "sieve (paper)", "window all"
"""Policies whose misses are counted: an oracle, ours, a model in Python, all batches known."""
COLD, BATCHES, DENSE, CACHED, ORDERED, HITS, POLICIES = (
    "cold", "batches", "dense", "cached", "ordered", "hits", "policies",
)  # fmt: skip

CASES = {
    one.name: one
    for one in (
        Case(
            name=COLD,
            note="each row once, in large batches",
            names=(peers.OURS, peers.EXACT, peers.POOL),
            fio="random",
        ),
        Case(
            name=BATCHES,
            note="each row once",
            names=(peers.OURS, peers.EXACT, peers.UNCHECKED, "penstock-async", peers.POOL, *PEERS),
            fio="random",
        ),
        Case(
            name=DENSE,
            note=f"{DENSE_PART:.0%} of rows of {DENSE_ROW_BYTES} bytes, at once",
            names=(peers.OURS, peers.EXACT, peers.SCAN),
            table="dense",
            fio="scan",
        ),
        Case(
            name=CACHED,
            note="likely rows lie anywhere",
            names=(
                peers.OURS,
                "penstock-0",
                "penstock-64",
                peers.FORESEEING,
                *EMULATED,
            ),
            is_cached=True,
        ),
        Case(
            name=ORDERED,
            note="likely rows lie in front",
            names=(peers.OURS, "penstock-0", peers.FORESEEING, *EMULATED),
            is_cached=True,
        ),
        Case(
            name=HITS,
            note="all rows are in memory",
            names=(peers.OURS, peers.CALLS, peers.RESIDENT, peers.REUSED),
            is_cached=True,
            is_warm=True,
        ),
    )
}
"""In the order of the first round; `POLICIES` comes after them."""
