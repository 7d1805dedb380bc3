"""Memory for weights, on the host or on a device, and the ring that units take ranges of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.tensors import dtypes

if TYPE_CHECKING:
    import torch


def on_device(nbytes: int, device: torch.device) -> Any:
    """Uninitialized bytes on a device."""
    return dtypes.import_torch().empty(nbytes, dtype=dtypes.import_torch().uint8, device=device)


class WeightMemory:
    """Host memory whose pages are allocated in the background, while the model is built and read.

    Allocating a `Buffers` first would wait up to seconds for a gigabyte, in which storage idles.
    One mapping for all weights needs no more pages than they have.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._native: _native.HostBuffer | None = _native.reserve(nbytes, nbytes)

    def tensor(self, nbytes: int) -> Any:
        """The first bytes of the memory; a larger mapping replaces it if there are too few."""
        torch = dtypes.import_torch()
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if nbytes > self._nbytes:
            # Frees the old mapping before making the new one.
            self._native = None
            self._nbytes, self._native = nbytes, _native.reserve(nbytes, nbytes)
        return torch.frombuffer(self._native, dtype=torch.uint8, count=nbytes)


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
    """Allocates ranges of a buffer, one after another, round and round."""

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
