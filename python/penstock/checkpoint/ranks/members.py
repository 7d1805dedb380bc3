"""`Members`: a subset of the ranks that save together."""

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
    """A subset of the ranks; compared by identity, as there may be thousands.

    Attributes:
        ranks: Their numbers in the group, ascending.
        token: Represents them in hashes.
    """

    ranks: tuple[int, ...]
    token: bytes = field(repr=False)

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Members:
        """Returns the members with these numbers."""
        members = tuple(sorted(ranks))
        text = ",".join(map(str, members)).encode()
        return cls(members, blake2b(text, digest_size=8).digest())

    @property
    def leader(self) -> int:
        """The lowest member."""
        return self.ranks[0]


class Copy(NamedTuple):
    """One rank's copy of a replicated tensor.

    Attributes:
        name: The name of the tensor.
        leader: The lowest rank that holds a copy.
        mark: The fingerprint of the elements.
        device: The device type. Copies on different device types have different fingerprints.
    """

    name: str
    leader: int
    mark: int
    device: str
