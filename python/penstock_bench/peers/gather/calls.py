"""Plans ahead which rows another system's cache reads and keeps, so that only I/O is timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock_bench.peers.gather.policies import Policy

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How somebody asks.

    Attributes:
        slots: Of the cache.
        line_rows: Rows in what is read at once, a line.
        keeps_lines: Whether lines are kept and looked for, each once in a batch; else rows.
        lines_min: A call takes batch after batch until it reads so many.
        rereads_written: Whether what the call before has read is read again, as it is being written
            to the cache meanwhile.
    """

    slots: int
    line_rows: int
    keeps_lines: bool = False
    lines_min: int = 0
    rereads_written: bool = False

    @property
    def unit_rows(self) -> int:
        """Rows of a slot."""
        return self.line_rows if self.keeps_lines else 1

    @property
    def read_at(self) -> int:
        """Where in memory lines are read to, in rows: behind the cache."""
        return -(-self.slots * self.unit_rows // self.line_rows) * self.line_rows

    def keys(self, batches: Sequence[_Array]) -> _Array:
        """The lines that are looked up, in order."""
        if not self.keeps_lines:
            return np.concatenate(batches)
        return np.concatenate([_once(ids // self.line_rows) for ids in batches])


@dataclass(frozen=True, slots=True)
class Call:
    """Batches that are served together.

    Memory holds the cache and, behind it, the rows that are read. The cache changes when all
    batches of the call have their rows.

    Attributes:
        where: For each batch, where in memory each of its rows lies, in rows.
        lines: What is read, in this order.
        kept_from: Where in memory what is new in the cache lies, in slots.
        kept_in: In which slots it is from then on.
        hits: Keys that were there.
    """

    where: list[_Array]
    lines: _Array
    kept_from: _Array
    kept_in: _Array
    hits: int


def planned(batches: Sequence[_Array], policy: Policy, rules: Rules) -> Iterator[Call]:
    """The calls that serve batches, each of which has an id once."""
    one = _Planned(rules, policy, frozenset())
    for ids in batches:
        one.take(ids)
        if len(one.lines) >= rules.lines_min:
            yield one.done()
            one = _Planned(rules, policy, frozenset(one.fresh) if rules.rereads_written else ())
    if one.where:
        yield one.done()


class _Planned:
    """A call that is being planned."""

    def __init__(self, rules: Rules, policy: Policy, written: frozenset[int] | tuple[()]) -> None:
        self.where: list[_Array] = []
        self.lines: list[int] = []
        self.fresh: dict[int, int] = {}
        self._rules = rules
        self._policy = policy
        self._written = written
        self._kept: dict[int, int] = {}
        self._hits = 0

    def take(self, ids: _Array) -> None:
        """Plans a batch."""
        size = self._rules.line_rows
        if self._rules.keeps_lines:
            lines = ids // size
            starts = {line: self._place(line, line, 0) for line in _once(lines).tolist()}
            found = np.array([starts[line] for line in lines.tolist()], np.int64) + ids % size
        else:
            found = np.array([self._place(row, row // size, row % size) for row in ids.tolist()])
        self.where.append(found)

    def _place(self, key: int, line: int, within: int) -> int:
        """Where in memory what has a key begins: read for it if it is not there."""
        slot = self._policy.find(key)
        if slot is not None and key not in self._written:
            self._hits += 1
            return self.fresh.get(key, slot * self._rules.unit_rows)
        at = self._rules.read_at + len(self.lines) * self._rules.line_rows + within
        self.lines.append(line)
        if slot is None and (slot := self._policy.admit(key)) is not None:
            self.fresh[key] = self._kept[slot] = at
        return at

    def done(self) -> Call:
        """The call."""
        rules = self._rules
        slots, places = (np.array([*some], np.int64) for some in (self._kept, self._kept.values()))
        # Rows to keep are read to the front, in the order of their slots: one copy moves them.
        kept = (places - rules.read_at) // rules.line_rows
        others = np.ones(len(self.lines), bool)
        others[kept] = False
        order = np.concatenate([kept, np.flatnonzero(others)])
        shifts = np.empty(len(order), np.int64)
        shifts[order] = (np.arange(len(order)) - order) * rules.line_rows
        lines = np.array(self.lines, np.int64)[order]
        where = [self._shifted(one, shifts) for one in self.where]
        kept_from = self._shifted(places, shifts) // rules.unit_rows
        return Call(where, lines, kept_from, slots, self._hits)

    def _shifted(self, places: _Array, shifts: _Array) -> _Array:
        read = places >= self._rules.read_at
        lines = (places[read] - self._rules.read_at) // self._rules.line_rows
        found = places.copy()
        found[read] += shifts[lines]
        return found


def _once(values: _Array) -> _Array:
    """Each value once, in the order in which they come first."""
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]
