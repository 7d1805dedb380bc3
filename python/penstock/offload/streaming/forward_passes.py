"""What passes through a model took, and how fast storage was meanwhile."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from penstock.common import tracing
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.io.transfer import Transfer, TransferReport

_PASSES_MAX = 1000
"""So many of the last ones are kept."""


class Pass(NamedTuple):
    """One pass.

    Attributes:
        computing_seconds: In calls of units, without what they waited.
        stalled_seconds: That calls waited for weights.
    """

    computing_seconds: float
    stalled_seconds: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.computing_seconds + self.stalled_seconds


class Passes:
    """The passes of a model: one ends where the unit is called again that was called first.

    Attributes:
        first: What the first one took, which read what stays as well; None before its end.
    """

    def __init__(self) -> None:
        self.first: Pass | None = None
        self._later: deque[Pass] = deque(maxlen=_PASSES_MAX)
        self._begins_with: int | None = None
        self._computed = self._stalled = 0.0

    def called(self, index: int) -> None:
        """A unit is about to be called."""
        if self._begins_with is None:
            self._begins_with = index
        elif index == self._begins_with and self._computed + self._stalled > 0:
            self._end()

    def took(self, *, computing_seconds: float = 0.0, stalled_seconds: float = 0.0) -> None:
        """A call has taken so long."""
        self._computed += computing_seconds
        self._stalled += stalled_seconds

    @property
    def usual(self) -> Pass | None:
        """The medians of those behind the first; the first where there is no other."""
        if not self._later:
            return self.first
        return Pass(*map(statistics.median, zip(*self._later, strict=True)))

    def _end(self) -> None:
        ended = Pass(self._computed, self._stalled)
        self._computed = self._stalled = 0.0
        if self.first is None:
            self.first = ended
        else:
            self._later.append(ended)


class Reads:
    """How fast reads were while there were any.

    Attributes:
        last: What the last one that has ended well tells.
    """

    def __init__(self) -> None:
        self.last: TransferReport | None = None
        self._under_way: deque[tuple[float, Transfer, str]] = deque()
        self._nbytes = 0
        self._seconds = 0.0
        self._busy_until = 0.0

    def begun(self, transfer: Transfer, name: str) -> None:
        """One has begun now, of the unit of that name."""
        self.settle()
        self._under_way.append((time.perf_counter(), transfer, name))

    def settle(self) -> None:
        """Counts those that have ended: in their order, so that no time counts twice."""
        while self._under_way and self._under_way[0][1].done():
            begun, transfer, name = self._under_way.popleft()
            try:
                self.last = transfer.result()
            except PenstockError:
                continue
            end = begun + self.last.seconds
            self._seconds += max(0.0, end - max(begun, self._busy_until))
            self._busy_until = max(self._busy_until, end)
            self._nbytes += self.last.nbytes
            tracing.past("read", begun, end, name, role="background")

    @property
    def gb_per_second(self) -> float | None:
        """GB (10**9 bytes) a second; None before the first has ended."""
        return self._nbytes / self._seconds / 1e9 if self._seconds else None
