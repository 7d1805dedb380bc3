"""A ring buffer's allocator: ranges are freed in the order of their allocation."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class RingRange:
    """An allocated range of the ring.

    Attributes:
        begin: Its offset, in bytes.
        nbytes: Its length.
        is_free: Whether it was given back.
    """

    begin: int
    nbytes: int
    is_free: bool = False


class Ring:
    """Allocates ranges of a buffer, one after another, round and round.

    Args:
        nbytes: Bytes of the buffer.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._claims: deque[RingRange] = deque()

    def take(self, nbytes: int) -> RingRange | None:
        """Allocates a range behind the last one, or at the beginning; `None` if neither is free."""
        begin = self._place(nbytes)
        if begin is None:
            return None
        claim = RingRange(begin, nbytes)
        self._claims.append(claim)
        return claim

    def _place(self, nbytes: int) -> int | None:
        if not self._claims:
            return 0 if nbytes <= self.nbytes else None
        first, last = self._claims[0], self._claims[-1]
        end = last.begin + last.nbytes
        if last.begin >= first.begin:
            if end + nbytes <= self.nbytes:
                return end
            return 0 if nbytes <= first.begin else None
        return end if end + nbytes <= first.begin else None

    def give_back(self, claim: RingRange) -> None:
        """Frees a range; its bytes can be allocated again once all earlier ranges are free."""
        claim.is_free = True
        while self._claims and self._claims[0].is_free:
            self._claims.popleft()
