"""`Cache`: rows that stay in memory, of all tables that share a budget."""

from __future__ import annotations

import os
import threading
from typing import Any, Literal, get_args

from penstock import _native
from penstock.common.option_kinds import Number

Policy = Literal["sieve", "s3fifo", "static", "none"]

_MEMORY = Number(1, (1 << 63) - 1, "bytes", is_open=False)
_SLOT_BYTES = {"sieve": 64, "s3fifo": 128, "static": 64, "none": 64}
"""What is known of a row that is there: its number, who uses it, when it goes; by S3-FIFO also
which rows have gone of late."""
_SLOTS_MAX = (1 << 32) - 2


class Cache:
    """Memory for rows of tables: ``penstock.features.open(…, cache=cache)``.

    All tables of a process that share it have rows of the same size. What is known of each row
    counts, so a row of 128 bytes takes 192. A row that is on its way for one batch is not read
    again for another one. Rows that a stream knows to be needed stay, those needed last go first
    (Belady); the policy says who goes of the others. Pickled, it arrives empty, with a budget of
    its own: memory is of a process.

    Args:
        memory_bytes: For all of them.
        policy: Which rows go when others come: ``"sieve"`` (Zhang et al., NSDI 2024) keeps those
            that were used since it last looked at them, ``"s3fifo"`` (Yang et al., SOSP 2023) those
            that were used again soon after they came; ``"static"`` keeps what is pinned
            (`Features.pin`) and nothing else, ``"none"`` nothing.

    Attributes:
        memory_bytes: The same.
        policy: The same.

    Raises:
        ValueError: A value is out of range.
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
        """The memory, for a table whose rows have so many bytes; see `native_cache`.

        Raises:
            ValueError: It has no room for a row, or rows of another size.
            StorageError: The system has no memory for it.
        """
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
    """Refuses what is no cache.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(cache, Cache | None):
        raise TypeError(f"cache={cache!r:.80}: must be a penstock.features.Cache or None")


def native_cache(cache: Cache | None, value_bytes: int, name: str) -> _native.RowCache | None:
    """The memory that a cache has for a table; None without one.

    Args:
        cache: The cache.
        value_bytes: Of a row.
        name: Of the table.

    Raises:
        TypeError: It is something else.
        ValueError: It has no room for a row, or rows of another size.
        StorageError: The system has no memory for it.
    """
    check_cache(cache)
    return None if cache is None else cache._of(value_bytes, name)
