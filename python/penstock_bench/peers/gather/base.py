"""The interface of a library that gathers rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    _Array = np.ndarray[Any, Any]

KEY = "rows"
"""The name of the table in its checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The table to gather from, and limits.

    Attributes:
        table: A checkpoint of Penstock with the table, which is int64.
        file: The file that has its rows, and maybe more.
        offset: Where in it they begin.
        rows: How many.
        row_bytes: Of one.
        place: A directory of its own, for files that it wants to have otherwise.
        cache_bytes: Memory for rows that are kept; 0 for none.
        depth: Requests in flight with which the device is at its best.
    """

    table: str
    file: str
    offset: int
    rows: int
    row_bytes: int
    place: str
    cache_bytes: int
    depth: int

    @property
    def words(self) -> int:
        """Elements of a row."""
        return self.row_bytes // 8

    @property
    def files(self) -> Path:
        """The directory of its own."""
        return Path(self.place)


class Gatherer(ABC):
    """One way to have rows by id; what most of them need not say stands here."""

    def prepare(  # noqa: B027 (most need nothing)
        self, setting: Setting, batches: Sequence[_Array]
    ) -> None:
        """Makes what it reads from, once, in a process without a limit; not timed."""

    @abstractmethod
    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """Opens it; not timed. It may look at what will be asked for, if it does not gather it."""

    @abstractmethod
    def gather(self, batches: Sequence[_Array]) -> Iterator[_Array]:
        """The rows of each batch: int64 of shape (ids, words), until the next one is asked for."""

    def counts(self) -> dict[str, int]:
        """Its counters so far, as far as it has them: ``requests``, ``hits``, ``read_rows``."""
        return {}

    def report(self) -> dict[str, Any]:
        """Its final report: ``is_direct``, ``setup``, ``notes``."""
        return {}


class Plain(Gatherer):
    """One that needs nothing but a function of a batch."""

    @abstractmethod
    def one(self, ids: _Array) -> _Array:
        """The rows of a batch."""

    def gather(self, batches: Sequence[_Array]) -> Iterator[_Array]:
        """Batch after batch."""
        return map(self.one, batches)
