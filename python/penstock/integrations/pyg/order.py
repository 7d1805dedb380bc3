"""`Order`: which nodes an epoch begins with, and which it has behind it."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator


class Order(Sampler[Any]):
    """The order of an epoch, which follows from a seed and the epoch alone.

    Args:
        given: What has an order of its own, of nodes or of batches of them; None for ours.
        is_shuffled: Whether ours is one of all orders, each as likely; else as they come.
        seed: Of that.

    Attributes:
        count: Of how many, where the order is ours.
        epoch: Which one is begun next.
        is_shuffled: The same.
        skipped: How many it leaves out, as they were there before it was interrupted.
    """

    def __init__(self, given: Any, *, is_shuffled: bool, seed: int) -> None:
        self.count = 0
        self._given = given
        self.is_shuffled = is_shuffled
        self._seed = seed
        self.epoch = 0
        self.skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Has the next one begin as that epoch."""
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
    """What draws random numbers that follow from some bytes and plain values alone."""
    found = hashlib.blake2b(digest_size=8)
    for one in told:
        found.update(one if isinstance(one, bytes) else f"{one} ".encode())
    made = torch.Generator()
    made.manual_seed(int.from_bytes(found.digest(), "little") >> 1)
    return made
