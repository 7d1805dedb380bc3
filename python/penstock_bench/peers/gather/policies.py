"""Cache policies of other systems, in Python and access by access, independent of our own code.

They serve as an oracle and plan the reads of others. Slow, and never timed.
"""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

NEVER = 1 << 62


class Policy(Protocol):
    """Slots, and which key has which. Keys are asked for in the order of a trace, by `find`."""

    def find(self, key: int) -> int | None:
        """The slot of a key that is there."""

    def admit(self, key: int) -> int | None:
        """A slot for the key that was asked for last and is not there; None for none."""


def misses(policy: Policy, keys: Sequence[int]) -> int:
    """How many of the keys are not there when they are asked for."""
    count = 0
    for key in keys:
        if policy.find(key) is None:
            count += 1
            policy.admit(key)
    return count


class Sieve:
    """SIEVE (Zhang et al., NSDI 2024), as its paper has it."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._visited: set[int] = set()
        # From old to new; None in place of who went, all of them before the hand.
        self._queue: list[int | None] = []
        self._hand = 0

    def find(self, key: int) -> int | None:
        """The slot of a key, which is visited now."""
        slot = self._slots.get(key)
        if slot is not None:
            self._visited.add(key)
        return slot

    def admit(self, key: int) -> int | None:
        """The next free slot, or that of whom the hand finds first without a visit."""
        slot = self._free.pop() if self._free else self._evicted()
        if slot is not None:
            self._slots[key] = slot
            self._queue.append(key)
        return slot

    def _evicted(self) -> int | None:
        while self._slots:
            key = self._queue[self._hand]
            assert key is not None
            is_visited = key in self._visited
            self._visited.discard(key)
            if not is_visited:
                self._queue[self._hand] = None
            self._hand += 1
            if self._hand == len(self._queue):
                self._queue = [one for one in self._queue if one is not None]
                self._hand = 0
            if not is_visited:
                return self._slots.pop(key)
        return None


class Belady:
    """Who is needed last goes first, and who would be that himself does not come (Belady, 1966).

    Keys of a stretch of the trace are known together: beyond its end nobody knows when a key is
    needed. Without a stretch all are known.
    """

    def __init__(self, slots: int, keys: np.ndarray[Any, Any], stretch: int | None = None) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._next = next_uses(keys).tolist()
        if stretch is not None:
            self._next = [
                use if use < (at // stretch + 1) * stretch else NEVER
                for at, use in enumerate(self._next)
            ]
        self._needed: dict[int, int] = {}
        # The one needed last is the first; entries of keys that went or were used since are stale.
        self._order: list[tuple[int, int]] = []
        self._at = -1

    def find(self, key: int) -> int | None:
        """The slot of a key, whose next use counts from now on."""
        self._at += 1
        slot = self._slots.get(key)
        if slot is not None:
            self._note(key)
        return slot

    def admit(self, key: int) -> int | None:
        """The next free slot, or that of who is needed last, if that is later than this one."""
        if self._free:
            slot = self._free.pop()
        else:
            while True:
                if not self._order:
                    return None
                needed, other = self._order[0]
                if self._needed.get(other) == -needed:
                    break
                heapq.heappop(self._order)
            if -needed <= self._next[self._at]:
                return None
            heapq.heappop(self._order)
            del self._needed[other]
            slot = self._slots.pop(other)
        self._slots[key] = slot
        self._note(key)
        return slot

    def _note(self, key: int) -> None:
        needed = self._next[self._at]
        self._needed[key] = needed
        heapq.heappush(self._order, (-needed, key))


class RandomAhead:
    """Anybody goes who is not needed within a window."""

    _LOOKS_MAX = 64

    def __init__(
        self, slots: int, keys: np.ndarray[Any, Any], *, window: int, seed: int = 0
    ) -> None:
        self._slots: dict[int, int] = {}
        self._keys: list[int] = []
        self._count = slots
        self._next = next_uses(keys).tolist()
        self._needed: list[int] = []
        self._window = window
        self._random = random.Random(seed)
        self._at = -1

    def find(self, key: int) -> int | None:
        """The slot of a key."""
        self._at += 1
        slot = self._slots.get(key)
        if slot is not None:
            self._needed[slot] = self._next[self._at]
        return slot

    def admit(self, key: int) -> int | None:
        """The next free slot, or that of somebody."""
        needed = self._next[self._at]
        if len(self._keys) < self._count:
            self._slots[key] = len(self._keys)
            self._keys.append(key)
            self._needed.append(needed)
            return self._slots[key]
        for _ in range(self._LOOKS_MAX if self._count else 0):
            slot = self._random.randrange(self._count)
            if self._needed[slot] - self._at > self._window:
                del self._slots[self._keys[slot]]
                self._slots[key] = slot
                self._keys[slot], self._needed[slot] = key, needed
                return slot
        return None


def next_uses(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where in a trace each key comes next; `NEVER` for not at all."""
    order = np.argsort(keys, kind="stable")
    found = np.full(len(keys), NEVER, np.int64)
    same = keys[order[:-1]] == keys[order[1:]]
    found[order[:-1][same]] = order[1:][same]
    return found
