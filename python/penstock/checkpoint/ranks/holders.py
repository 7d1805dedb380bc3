"""Finds which of many ranks hold the same plain tensors, from the fingerprints of each.

The fingerprints of a rank's tensors are combined into one digest, which most ranks share. Only if
digests differ does one rank of each *group* with the same digest publish its fingerprints.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTHING = "-"
"""Represents the plain tensors of a rank without any."""


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
