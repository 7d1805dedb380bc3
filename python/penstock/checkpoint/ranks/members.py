"""`Members`: some of the ranks that save together."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Some of the ranks that save together; compared by identity, as there may be thousands.

    Attributes:
        ranks: Their numbers in the group, ascending.
        token: Stands for them in hashes.
    """

    ranks: tuple[int, ...]
    token: bytes = field(repr=False)

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Members:
        """The members with these numbers."""
        members = tuple(sorted(ranks))
        text = ",".join(map(str, members)).encode()
        return cls(members, blake2b(text, digest_size=8).digest())

    @property
    def leader(self) -> int:
        """The lowest of them."""
        return self.ranks[0]


class Copy(NamedTuple):
    """What a rank holds of a tensor where others hold the same.

    Attributes:
        name: Of the tensor.
        leader: The lowest of those who hold the same.
        mark: Stands for the elements.
        device: Where they are. Those of different devices have different marks in any case.
    """

    name: str
    leader: int
    mark: int
    device: str
