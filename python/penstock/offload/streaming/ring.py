"""Memory that is taken in turns: what was taken first is given back first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class Claim:
    """A part of the ring.

    Attributes:
        begin: Where it begins.
        nbytes: How long it is.
        is_free: Whether it was given back.
    """

    begin: int
    nbytes: int
    is_free: bool = False


class Ring:
    """Says where in so many bytes there is room, one stretch behind the other, round and round.

    Args:
        nbytes: How many there are.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._claims: deque[Claim] = deque()

    def take(self, nbytes: int) -> Claim | None:
        """A stretch behind the last one, or at the beginning; `None` where none is free."""
        begin = self._place(nbytes)
        if begin is None:
            return None
        claim = Claim(begin, nbytes)
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

    def give_back(self, claim: Claim) -> None:
        """Frees a stretch; it can be taken again when those before it are free, too."""
        claim.is_free = True
        while self._claims and self._claims[0].is_free:
            self._claims.popleft()
