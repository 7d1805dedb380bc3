"""Cache policies of other systems, in Python and access by access, independent of our own code.

They serve as an oracle and plan the reads of others. Slow, and never timed.
"""

from __future__ import annotations

import heapq
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
    """SIEVE (Zhang et al., NSDI 2024), as its paper has it.

    Args:
        slots: How many.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._keys = [0] * slots
        self._is_visited = [False] * slots
        # Neighbours in the queue: the newest is the head, and the hand moves from old to new.
        self._newer: list[int | None] = [None] * slots
        self._older: list[int | None] = [None] * slots
        self._newest: int | None = None
        self._oldest: int | None = None
        self._hand: int | None = None

    def find(self, key: int) -> int | None:
        """The slot of a key, which is visited now."""
        slot = self._slots.get(key)
        if slot is not None:
            self._is_visited[slot] = True
        return slot

    def admit(self, key: int) -> int | None:
        """The next free slot, or that of whom the hand finds first without a visit."""
        slot = self._free.pop() if self._free else self._evicted()
        if slot is None:
            return None
        self._slots[key] = slot
        self._keys[slot] = key
        self._is_visited[slot] = False
        self._older[slot], self._newer[slot] = self._newest, None
        if self._newest is not None:
            self._newer[self._newest] = slot
        self._newest = slot
        if self._oldest is None:
            self._oldest = slot
        return slot

    def _evicted(self) -> int | None:
        at = self._oldest if self._hand is None else self._hand
        if at is None:
            return None
        while self._is_visited[at]:
            self._is_visited[at] = False
            newer = self._newer[at]
            at = self._oldest if newer is None else newer
            if at is None:
                raise AssertionError("a queue with somebody in it has an oldest")
        older, newer = self._older[at], self._newer[at]
        self._hand = newer
        if newer is None:
            self._newest = older
        else:
            self._older[newer] = older
        if older is None:
            self._oldest = newer
        else:
            self._newer[older] = newer
        del self._slots[self._keys[at]]
        return at


class Belady:
    """Who is needed last goes first, and who would be that himself does not come (Belady, 1966).

    Args:
        slots: How many.
        keys: All that will be asked for, in order.
        stretch: Keys of the trace that are known together: beyond the end of their stretch nobody
            knows when a key is needed. None for all of them.
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
    """Anybody goes who is not needed within a window.

    Args:
        slots: How many.
        keys: All that will be asked for, in order.
        window: How many of these are known.
        seed: Of who goes.
    """

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
        self._chosen = _Chosen(slots, seed)
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
            slot = self._chosen.next()
            if self._needed[slot] - self._at > self._window:
                del self._slots[self._keys[slot]]
                self._slots[key] = slot
                self._keys[slot], self._needed[slot] = key, needed
                return slot
        return None


class _Chosen:
    """Numbers at random, drawn by the thousand."""

    def __init__(self, count: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._count = count
        self._drawn: list[int] = []

    def next(self) -> int:
        if not self._drawn:
            self._drawn = self._rng.integers(0, self._count, 1 << 16).tolist()
        return self._drawn.pop()


def next_uses(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where in a trace each key comes next; `NEVER` for not at all."""
    order = np.argsort(keys, kind="stable")
    found = np.full(len(keys), NEVER, np.int64)
    same = keys[order[:-1]] == keys[order[1:]]
    found[order[:-1][same]] = order[1:][same]
    return found
