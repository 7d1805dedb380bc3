"""`Members`: a subset of the ranks that save together, such as those that hold the same tensor.

Which ranks hold the same plain tensors is found from the fingerprints of each. The fingerprints of
a rank's tensors are combined into one digest, which most ranks share. Only if digests differ does
one rank of each *group* with the same digest publish its fingerprints.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

NOTHING = "-"
"""Represents the plain tensors of a rank without any."""


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
        return cls.of_array(np.fromiter(ranks, np.int64))

    @classmethod
    def of_array(cls, ranks: npt.NDArray[np.int64]) -> Members:
        """Returns the members with these numbers, of which there may be a hundred thousand."""
        members = np.sort(ranks).astype("<i8", copy=False)
        digest = blake2b(members.tobytes(), digest_size=8).digest()
        return cls(tuple(members.tolist()), digest)

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


def groups_of(digests: Sequence[str]) -> list[list[int]]:
    """Groups the ranks with any plain tensor by digest."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        if digest != NOTHING:
            groups[digest].append(rank)
    return list(groups.values())


def classes_of(groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the number of groups, and the groups of several ranks; all ranks read this."""
    return {"count": len(groups), "larger": [group for group in groups if len(group) > 1]}


def sums_of(groups: Sequence[Sequence[int]], texts: Sequence[str]) -> dict[str, Any]:
    """Maps each hash in the sets of several groups to the number of a choice of ranks.

    Choices are numbered from 1; a hash of a single group needs none.
    """
    having: defaultdict[int, list[int]] = defaultdict(list)
    for index, text in enumerate(texts):
        for (one,) in struct.iter_unpack("<Q", bytes.fromhex(text)):
            having[one].append(index)
    number_of: dict[tuple[int, ...], int] = {}
    of = {
        f"{one:x}": number_of.setdefault(tuple(indices), len(number_of) + 1)
        for one, indices in having.items()
        if len(indices) > 1
    }
    members = [[rank for index in indices for rank in groups[index]] for indices in number_of]
    return {"members": members, "of": of}
