"""Which rows are asked for, in which order: ids in batches, by laws that tables meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Law = Literal["uniform", "degree", "zipf"]

_EXPONENTS = {"degree": 1 / 1.3, "zipf": 1.0}
"""The exponent of a weight by rank. Degrees of citation graphs follow a law with the exponent 2.3,
so that those of nodes in order fall with the power 1 / (2.3 - 1)."""
_DRAWN_MIN = 64
_DRAWN_TIMES = 4
"""A batch of rows that are drawn, each once, has no more than one of so many: what is left to be
drawn in the end is unlikely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Batches of ids, each id once in a batch.

    Attributes:
        law: ``"uniform"``, each row as likely as any other, and no row twice in all; ``"degree"``,
            as neighbours in a graph; ``"zipf"``, as words in a text.
        rows: Of the table.
        batches: How many.
        batch_rows: Of each.
        recurring: The part of a batch that are seeds: rows of a fixed set, one after the other, in
            another order in each epoch.
        is_permuted: Whether likely rows lie anywhere; else the likelier, the nearer to the front,
            as generators of graphs number them.
        seed: Of everything that is drawn.
    """

    law: Law
    rows: int
    batches: int
    batch_rows: int
    recurring: float = 0.0
    is_permuted: bool = True
    seed: int = 0

    def ids(self) -> np.ndarray[Any, Any]:
        """All of them: int64 of shape (batches, batch_rows).

        Raises:
            ValueError: The table has too few rows.
        """
        self.check()
        rng = np.random.default_rng(self.seed)
        shape = self.batches, self.batch_rows
        if self.law == "uniform":
            chosen = rng.permutation(self.rows)[: self.batches * self.batch_rows]
            return chosen.reshape(shape).astype(np.int64)
        found = np.empty(shape, np.int64)
        drawn = _Drawn(rng, self.rows, _EXPONENTS[self.law])
        seeds = _Seeds(rng, self.rows, self.recurring)
        count = round(self.recurring * self.batch_rows)
        for batch in found:
            batch[:] = drawn.beside(seeds.next(count), self.batch_rows)
        if self.is_permuted:
            found = rng.permutation(self.rows)[found]
        return found

    def check(self) -> None:
        """Finds out whether the table has rows enough."""
        needed = self.batch_rows * (self.batches if self.law == "uniform" else _DRAWN_TIMES)
        if needed > self.rows:
            raise ValueError(
                f"{self.batches} batches of {self.batch_rows} rows, by the law {self.law!r}, take a"
                f" table of {needed:,} rows; this one has {self.rows:,}"
            )


class _Drawn:
    """Draws rows by their weights."""

    def __init__(self, rng: np.random.Generator, rows: int, exponent: float) -> None:
        self._rng = rng
        self._sums = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)

    def beside(self, seeds: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        """So many rows, each once: the seeds first, then in the order in which they are drawn."""
        found = seeds
        while len(found) < count:
            more = max(_DRAWN_MIN, 2 * (count - len(found)))
            at = self._rng.random(more) * self._sums[-1]
            drawn = np.searchsorted(self._sums, at, side="right")
            both = np.concatenate([found, drawn])
            _, first = np.unique(both, return_index=True)
            found = both[np.sort(first)]
        return found[:count]


class _Seeds:
    """A fixed set of rows that comes again and again."""

    def __init__(self, rng: np.random.Generator, rows: int, part: float) -> None:
        self._rng = rng
        # A hundredth of the nodes of papers100M are such that are trained on.
        self._rows = rng.permutation(rows)[: max(1, rows // 100)]
        self._order = self._rows[:0]
        self._is_used = part > 0

    def next(self, count: int) -> np.ndarray[Any, Any]:
        """The next ones; fewer where the set is smaller."""
        if not self._is_used:
            return self._rows[:0]
        if len(self._order) < count:
            self._order = self._rng.permutation(self._rows)
        taken, self._order = self._order[:count], self._order[count:]
        return taken
