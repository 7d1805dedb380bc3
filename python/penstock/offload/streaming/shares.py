"""Which units stay in memory, and how much is left for those that pass through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.offload.buffers import Buffers
from penstock.offload.streaming.units import PAGE_BYTES

if TYPE_CHECKING:
    from penstock.offload.streaming.units import Unit

_RING_UNITS = 3
"""One in use, one that is there, one that is read: so the device always has something to do."""
_HUGE_PAGE_BYTES = 2 << 20
"""From here on memory is taken in whole ones."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What the budget is spent on.

    Attributes:
        resident: Indices of the units that stay once they were read.
        resident_bytes: Memory that those take, in whole pages.
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
    sizes = [Buffers.whole_bytes(unit.nbytes) for unit in units]
    everything = sum(sizes)
    if everything <= budget_bytes:
        return Shares(frozenset(range(len(units))), everything, 0)
    # What is in use while others are called cannot pass through before them.
    resident = {
        index
        for index, unit in enumerate(units)
        if not unit.is_block and any(unit.encloses(other) for other in units)
    }
    passing = set(range(len(units))) - resident
    left = budget_bytes - sum(sizes[index] for index in resident)
    largest = max(passing or resident, key=lambda index: sizes[index])
    needed = sizes[largest] if passing else 0
    if needed > left or not passing:
        least = budget_bytes - left + needed
        raise ValueError(
            f"memory_bytes={budget_bytes}: {units[largest].name!r} takes {sizes[largest]}, and"
            f" with what is used meanwhile {least} is the least that works"
        )
    beside = [index for index in passing if not units[index].is_block]
    for index in sorted(beside, key=lambda index: sizes[index]):
        if left - sizes[index] >= max((sizes[one] for one in passing - {index}), default=0):
            passing.remove(index)
            left -= sizes[index]
    largest_bytes = max(sizes[index] for index in passing)
    ring_bytes = min(_RING_UNITS * largest_bytes, _whole_below(left))
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    if blocks:
        count = (left - ring_bytes) // max(sizes[index] for index in blocks)
        passing -= _spread(blocks, min(len(blocks), count))
    resident = set(range(len(units))) - passing
    resident_bytes = sum(sizes[index] for index in resident)
    return Shares(frozenset(resident), resident_bytes, ring_bytes)


def _whole_below(nbytes: int) -> int:
    """The largest memory that takes no more than so many bytes of `Buffers`."""
    page_bytes = _HUGE_PAGE_BYTES if nbytes >= _HUGE_PAGE_BYTES else PAGE_BYTES
    return nbytes // page_bytes * page_bytes


def _spread(indices: list[int], count: int) -> set[int]:
    """So many of them, evenly."""
    total = len(indices)
    return {
        index
        for place, index in enumerate(indices)
        if (place + 1) * count // total > place * count // total
    }
