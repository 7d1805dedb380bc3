"""`Cache`: a budget of memory in which tables keep rows."""

from __future__ import annotations

import os
import threading
from typing import Any, Literal, get_args

from penstock import _native
from penstock.common.option_kinds import Number

Policy = Literal["sieve", "s3fifo", "static", "none"]

_MEMORY = Number(1, (1 << 63) - 1, "bytes", is_open=False)
_SLOT_BYTES = {"sieve": 64, "s3fifo": 128, "static": 64, "none": 64}
"""Bookkeeping of one cached row: its number, its users, its place in the eviction order; with
S3-FIFO also the rows evicted lately."""
_SLOTS_MAX = (1 << 32) - 2


class Cache:
    """Memory for rows of tables: ``penstock.features.open(…, cache=cache)``.

    All tables that share a cache have rows of the same size. The budget includes 64 bytes of
    bookkeeping for each row (128 with ``"s3fifo"``), so a row of 128 bytes takes 192. A row already
    being read for one batch is not read again for another. Rows that a stream knows it will need
    stay; when they do not all fit, the one needed last is evicted first (Belady). The policy
    chooses among all other rows. A pickled cache arrives empty in the other process, with the same
    budget.

    Args:
        memory_bytes: The budget, for all tables together.
        policy: Which rows are evicted: ``"sieve"`` (Zhang et al., NSDI 2024) keeps rows used since
            its hand last passed them; ``"s3fifo"`` (Yang et al., SOSP 2023) keeps rows used again
            soon after they were read; ``"static"`` keeps only pinned rows (`Features.pin`);
            ``"none"`` keeps nothing.

    Attributes:
        memory_bytes: The budget in bytes.
        policy: The eviction policy.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, memory_bytes: int, policy: Policy = "sieve") -> None:
        _MEMORY.check("memory_bytes", memory_bytes)
        if policy not in get_args(Policy):
            raise ValueError(f"policy={policy!r}: must be one of {', '.join(get_args(Policy))}")
        self.memory_bytes = memory_bytes
        self.policy = policy
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._rows: tuple[int, _native.RowCache] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.memory_bytes, self.policy)

    def _of(self, value_bytes: int, name: str) -> _native.RowCache:
        """The native cache for a table whose rows have that many bytes; see `native_cache`."""
        if self._process != os.getpid():
            raise ValueError("a cache is of the process that made it: make one in each")
        with self._lock:
            if self._rows is None:
                taken_bytes = value_bytes + _SLOT_BYTES[self.policy]
                slots = min(self.memory_bytes // taken_bytes, _SLOTS_MAX)
                if slots == 0:
                    raise ValueError(
                        f"memory_bytes={self.memory_bytes}: a row of {name} takes {taken_bytes}"
                    )
                self._rows = value_bytes, _native.RowCache(slots, value_bytes, self.policy)
            held_bytes, native = self._rows
            if held_bytes != value_bytes:
                raise ValueError(
                    f"cache: it holds rows of {held_bytes} bytes, and those of {name} have"
                    f" {value_bytes}: give it a Cache of its own"
                )
            return native


def check_cache(cache: Cache | None) -> None:
    """Raises `TypeError` unless ``cache`` is a `Cache` or None."""
    if not isinstance(cache, Cache | None):
        raise TypeError(f"cache={cache!r:.80}: must be a penstock.features.Cache or None")


def native_cache(cache: Cache | None, value_bytes: int, name: str) -> _native.RowCache | None:
    """The native cache that a table uses; None without a cache."""
    check_cache(cache)
    return None if cache is None else cache._of(value_bytes, name)
