"""Who of many ranks has which plain tensors, out of what each says of its own.

Of all of a rank's there is one digest, which most ranks have in common. Only where these differ
does one rank of each *group* of the same digest tell the fingerprints of its tensors one by one.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTHING = "-"
"""Stands for the plain tensors of a rank that has none."""


def groups_of(digests: Sequence[str]) -> list[list[int]]:
    """Ranks of the same digest, of those that have any plain tensor."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        if digest != NOTHING:
            groups[digest].append(rank)
    return list(groups.values())


def classes_of(groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many groups there are, and those of more than one rank: all ranks read this."""
    return {"count": len(groups), "larger": [group for group in groups if len(group) > 1]}


def sums_of(groups: Sequence[Sequence[int]], texts: Sequence[str]) -> dict[str, Any]:
    """For each hash in the sets of several groups, who has it: the number of a choice of ranks.

    Choices are counted from 1; what only one group has needs none.
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
