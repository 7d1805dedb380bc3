"""`Order`: the order of an epoch's input nodes, and where to begin in it."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator


class Order(Sampler[Any]):
    """The order of an epoch, determined by a seed and the epoch alone.

    Args:
        given: A sampler with its own order, of nodes or of batches; None for this class's.
        is_shuffled: Whether this class's order is a uniform random permutation; else ascending.
        seed: Its seed.

    Attributes:
        count: The number of nodes, for this class's order.
        epoch: The epoch that begins next.
        is_shuffled: As given.
        skipped: Entries to skip, as they were used before an interruption.
    """

    def __init__(self, given: Any, *, is_shuffled: bool, seed: int) -> None:
        self.count = 0
        self._given = given
        self.is_shuffled = is_shuffled
        self._seed = seed
        self.epoch = 0
        self.skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that begins next."""
        self.epoch = epoch
        if hasattr(self._given, "set_epoch"):
            self._given.set_epoch(epoch)

    def __len__(self) -> int:
        return self.count if self._given is None else len(self._given)

    def __iter__(self) -> Iterator[Any]:
        if self._given is not None:
            return itertools.islice(iter(self._given), self.skipped, None)
        if not self.is_shuffled:
            return iter(range(self.skipped, self.count))
        generator = seeded("order", self._seed, self.epoch)
        order = torch.randperm(self.count, generator=generator, device="cpu")
        return iter(order[self.skipped :].tolist())


def seeded(*told: object) -> torch.Generator:
    """A generator seeded from bytes and plain values."""
    found = hashlib.blake2b(digest_size=8)
    for one in told:
        found.update(one if isinstance(one, bytes) else f"{one} ".encode())
    made = torch.Generator()
    made.manual_seed(int.from_bytes(found.digest(), "little") >> 1)
    return made
