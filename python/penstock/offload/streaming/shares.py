"""Which units stay in memory, and how much is left for those that pass through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.offload.streaming.units import Unit

_RING_UNITS = 3
"""One in use, one that is there, one that is read: so the device always has something to do."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What the budget is spent on.

    Attributes:
        resident: Indices of the units that stay once they were read.
        resident_bytes: Memory that those take.
        ring_bytes: Memory that the others pass through.
    """

    resident: frozenset[int]
    resident_bytes: int
    ring_bytes: int


def shared_out(units: list[Unit], budget_bytes: int) -> Shares:
    """What of a budget is for which.

    Every byte that stays saves as many of each pass, whosever it is, as units are used in a circle:
    what was used last is needed last. What stands beside the blocks stays first, the small before
    the large, then as many blocks as there is room for, evenly among the others, so that reading
    never pauses for long.

    Args:
        units: In their order.
        budget_bytes: For all weights.

    Raises:
        ValueError: It is too small for the largest of them.
    """
    everything = sum(unit.nbytes for unit in units)
    if everything <= budget_bytes:
        return Shares(frozenset(range(len(units))), everything, 0)
    sizes = [unit.nbytes for unit in units]
    # What is in use while others are called cannot pass through before them.
    resident = {
        index
        for index, unit in enumerate(units)
        if not unit.is_block and any(unit.encloses(other) for other in units)
    }
    passing = set(range(len(units))) - resident
    left = budget_bytes - sum(sizes[index] for index in resident)
    largest = max(passing, key=lambda index: sizes[index])
    if sizes[largest] > left:
        raise ValueError(
            f"memory_bytes={budget_bytes}: {units[largest].name!r} takes {sizes[largest]}, and"
            f" with what is used meanwhile {sizes[largest] + budget_bytes - left} is the least that"
            " works"
        )
    beside = [index for index in passing if not units[index].is_block]
    for index in sorted(beside, key=lambda index: sizes[index]):
        if left - sizes[index] >= max((sizes[one] for one in passing - {index}), default=0):
            passing.remove(index)
            left -= sizes[index]
    largest_bytes = max(sizes[index] for index in passing)
    ring_bytes = min(_RING_UNITS * largest_bytes, left)
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    if blocks:
        count = (left - ring_bytes) // max(sizes[index] for index in blocks)
        passing -= _spread(blocks, min(len(blocks), count))
    resident = set(range(len(units))) - passing
    resident_bytes = sum(units[index].nbytes for index in resident)
    return Shares(frozenset(resident), resident_bytes, ring_bytes)


def _spread(indices: list[int], count: int) -> set[int]:
    """So many of them, evenly."""
    total = len(indices)
    return {
        index
        for place, index in enumerate(indices)
        if (place + 1) * count // total > place * count // total
    }
