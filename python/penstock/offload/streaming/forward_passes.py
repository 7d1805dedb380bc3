"""Counters and times of passes through a model, and the speed of storage meanwhile."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.common import tracing
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.io.transfer import Transfer, TransferReport
    from penstock.offload.streaming.weights.sealed_read import SealedRead

_PASSES_MAX = 1000
"""The number of passes kept, the newest ones."""


@dataclass(slots=True)
class Counts:
    """Counters since the model was made.

    Attributes:
        read_bytes: Bytes read from storage.
        stalled_seconds: Seconds that calls of blocks have waited for their weights.
        uses: Calls of blocks, and of the modules beside them.
        hits: Calls of these whose weights were in memory.
        passes: Passes begun, as `ForwardPasses` tells them apart.
    """

    read_bytes: int = 0
    stalled_seconds: float = 0.0
    uses: int = 0
    hits: int = 0
    passes: int = 0


class ForwardPass(NamedTuple):
    """Times of one pass.

    Attributes:
        computing_seconds: Seconds in calls of units, without waiting.
        stalled_seconds: Seconds that calls waited for weights.
    """

    computing_seconds: float
    stalled_seconds: float

    @property
    def seconds(self) -> float:
        """Computing and waiting together."""
        return self.computing_seconds + self.stalled_seconds


class ForwardPasses:
    """The passes of a model: a pass ends when the module that began it is called again.

    A pass also ends when another module of the same unit is called again, with other units called
    in between; that module begins passes from then on. The encoder and the decoder of a model may
    embed by modules of one weight, and only the decoder's is called for each token.

    Attributes:
        first: Times of the first pass, which also reads resident weights; None before its end.
    """

    def __init__(self) -> None:
        self.first: ForwardPass | None = None
        self._later: deque[ForwardPass] = deque(maxlen=_PASSES_MAX)
        self._index: int | None = None
        self._place = 0
        self._others = 0
        self._called: dict[int, int] = {}
        """The places called in this pass, each with the calls of other units before."""
        self._computed = self._stalled = 0.0

    def called(self, index: int, place: int) -> bool:
        """Notes the call of a unit's module; returns whether it begins a pass.

        Modules of a unit are told apart: the first and the last module called may share a tensor.
        """
        if self._index is None:
            self._index, self._place = index, place
            self._called = {place: 0}
            return True
        if index != self._index:
            self._others += 1
            return False
        # A head that computes its output in several calls begins no pass.
        is_again = place == self._place or self._called.get(place, self._others) < self._others
        if not is_again or not self._computed + self._stalled:
            self._called[place] = self._others
            return False
        self._end()
        self._place = place
        self._called = {place: self._others}
        return True

    def took(self, *, computing_seconds: float = 0.0, stalled_seconds: float = 0.0) -> None:
        """Adds the times of a call."""
        self._computed += computing_seconds
        self._stalled += stalled_seconds

    @property
    def usual(self) -> ForwardPass | None:
        """The medians of all passes but the first; the first if there is no other."""
        if not self._later:
            return self.first
        return ForwardPass(*map(statistics.median, zip(*self._later, strict=True)))

    def _end(self) -> None:
        ended = ForwardPass(self._computed, self._stalled)
        self._computed = self._stalled = 0.0
        if self.first is None:
            self.first = ended
        else:
            self._later.append(ended)


class ReadSpeed:
    """The speed of reads, over the time in which at least one was in flight."""

    def __init__(self) -> None:
        self.last: TransferReport | None = None
        self._under_way: deque[tuple[float, Transfer | SealedRead, str]] = deque()
        self._nbytes = 0
        self._seconds = 0.0
        self._busy_until = 0.0

    def begun(self, transfer: Transfer | SealedRead, name: str) -> None:
        """Notes that a read of the named unit has begun."""
        self.count_ended()
        self._under_way.append((time.perf_counter(), transfer, name))

    def count_ended(self) -> None:
        """Counts ended reads, in the order of their begin, so that no time counts twice."""
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
        """GB (10**9 bytes) per second; None before the first read has ended."""
        return self._nbytes / self._seconds / 1e9 if self._seconds else None
