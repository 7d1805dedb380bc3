"""Which units stay in memory, and how much is left for those that pass through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.offload.streaming.units import PAGE_BYTES

if TYPE_CHECKING:
    from penstock.offload.streaming.units import Unit

_RING_UNITS = 3
"""One in use, one that is there, one that is read: so the device always has something to do."""
_SLOTS_MIN = 2
"""Of experts: one that is computed with, one that is read."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What the budget is spent on.

    Attributes:
        resident: Indices of the units that stay once they were read.
        resident_bytes: Memory that those take, in whole pages.
        ring_bytes: Memory that the others pass through.
        held_bytes: Memory of weights that were there before, and stay.
        slot_count: How many experts have room.
    """

    resident: frozenset[int]
    resident_bytes: int
    ring_bytes: int
    held_bytes: int = 0
    slot_count: int = 0


class Slots(NamedTuple):
    """What experts make of memory: room for some of them, which they come and go in.

    Attributes:
        expert_count: How many experts there are.
        slot_bytes: What has room for any of them.
    """

    expert_count: int = 0
    slot_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """With less it does not work."""
        return self.bytes_of(min(_SLOTS_MIN, self.expert_count))

    @property
    def most_bytes(self) -> int:
        """More than that is of no use."""
        return self.bytes_of(self.expert_count)

    def bytes_of(self, slot_count: int) -> int:
        """Memory that so many take."""
        return slot_count * self.slot_bytes

    def count_in(self, nbytes: int) -> int:
        """How many there is room for in so much memory."""
        return min(self.expert_count, nbytes // max(1, self.slot_bytes))


NO_SLOTS = Slots()


class Needs(NamedTuple):
    """What a model makes of memory.

    Attributes:
        least_bytes: With less it does not work.
        most_bytes: More than that is of no use.
        why: What takes the least, in words.
    """

    least_bytes: int
    most_bytes: int
    why: str


def shared_out(
    units: list[Unit], memory_bytes: int, held_bytes: int = 0, slots: Slots = NO_SLOTS
) -> Shares:
    """What of a budget is for which.

    Every byte that stays saves as many of each pass, whosever it is, as units are used in a circle:
    what was used last is needed last. What stands beside the blocks stays first, the small before
    the large, then as many blocks as there is room for, evenly among the others, so that reading
    never pauses for long. What all of that has no use for is for experts: of those a pass needs a
    part only, so a byte of them saves less.

    Args:
        units: In their order.
        memory_bytes: For all weights.
        held_bytes: Of those that are there already, and stay.
        slots: For experts.

    Raises:
        ValueError: It is too small for the largest of them.
    """
    sizes = [unit.nbytes for unit in units]
    needs = needs_of(units, held_bytes, slots)
    if memory_bytes < needs.least_bytes:
        raise ValueError(
            f"memory_bytes={memory_bytes}: {needs.why}, and {needs.least_bytes} is the least that"
            " works"
        )
    left = memory_bytes - held_bytes - slots.least_bytes
    if left >= sum(sizes):
        slot_count = slots.count_in(memory_bytes - held_bytes - sum(sizes))
        return Shares(frozenset(range(len(units))), sum(sizes), 0, held_bytes, slot_count)
    resident = _used_meanwhile(units)
    passing = set(range(len(units))) - resident
    left -= sum(sizes[index] for index in resident)
    beside = [index for index in passing if not units[index].is_block]
    for index in sorted(beside, key=lambda index: sizes[index]):
        if left - sizes[index] >= max((sizes[one] for one in passing - {index}), default=0):
            passing.remove(index)
            left -= sizes[index]
    largest_bytes = max(sizes[index] for index in passing)
    ring_bytes = min(_RING_UNITS * largest_bytes, left // PAGE_BYTES * PAGE_BYTES)
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    if blocks:
        count = (left - ring_bytes) // max(sizes[index] for index in blocks)
        passing -= _spread(blocks, min(len(blocks), count))
    resident = set(range(len(units))) - passing
    resident_bytes = sum(sizes[index] for index in resident)
    slot_count = slots.count_in(memory_bytes - held_bytes - resident_bytes - ring_bytes)
    return Shares(frozenset(resident), resident_bytes, ring_bytes, held_bytes, slot_count)


def needs_of(units: list[Unit], held_bytes: int, slots: Slots = NO_SLOTS) -> Needs:
    """Between what and what a budget makes a difference."""
    sizes = [unit.nbytes for unit in units]
    most_bytes = held_bytes + sum(sizes) + slots.most_bytes
    resident = _used_meanwhile(units)
    passing = [index for index in range(len(units)) if index not in resident]
    experts = f", room for experts {slots.least_bytes}" if slots.expert_count else ""
    if not passing:
        least_bytes = most_bytes - slots.most_bytes
        why = f"all of its weights, {least_bytes}, are used together{experts}"
        return Needs(least_bytes + slots.least_bytes, most_bytes, why)
    largest = max(passing, key=lambda index: sizes[index])
    meanwhile_bytes = held_bytes + sum(sizes[index] for index in resident)
    why = f"{units[largest].name!r} takes {sizes[largest]}"
    if meanwhile_bytes:
        why += f" and what is there meanwhile {meanwhile_bytes}"
    least_bytes = meanwhile_bytes + sizes[largest] + slots.least_bytes
    return Needs(least_bytes, most_bytes, why + experts)


def _used_meanwhile(units: list[Unit]) -> set[int]:
    """What is in use while others are called: it cannot pass through before them."""
    return {
        index
        for index, unit in enumerate(units)
        if not unit.is_block and any(unit.encloses(other) for other in units)
    }


def _spread(indices: list[int], count: int) -> set[int]:
    """So many of them, evenly."""
    total = len(indices)
    return {
        index
        for place, index in enumerate(indices)
        if (place + 1) * count // total > place * count // total
    }
