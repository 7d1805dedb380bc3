"""Divides memory: units that stay, the ring for the others, slots for experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.offload.streaming.weights.units import PAGE_BYTES

if TYPE_CHECKING:
    from penstock.offload.streaming.weights.units import Unit

_RING_UNITS = 3
"""One unit in use, one read, one being read: the device always has work."""
_SLOTS_MIN = 2
"""Slots for experts: one to compute with, one being read."""


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """How a model's memory is divided.

    Attributes:
        resident: Indices of the units that stay in memory once they are read.
        resident_bytes: Their memory, in whole pages.
        ring_bytes: Memory through which the other units are streamed.
        held_bytes: Memory of weights that were in memory before, and stay.
        slot_count: The number of experts that fit.
    """

    resident: frozenset[int]
    resident_bytes: int
    ring_bytes: int
    held_bytes: int = 0
    slot_count: int = 0


class Slots(NamedTuple):
    """Memory for experts: slots into which they are read in turn."""

    expert_count: int = 0
    slot_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """The least memory with which experts can be called."""
        return self.bytes_of(min(_SLOTS_MIN, self.expert_count))

    @property
    def most_bytes(self) -> int:
        """Memory for all experts; more is of no use."""
        return self.bytes_of(self.expert_count)

    def bytes_of(self, slot_count: int) -> int:
        """Memory of that many slots."""
        return slot_count * self.slot_bytes

    def count_in(self, nbytes: int) -> int:
        """The number of experts that fit into that much memory."""
        return min(self.expert_count, nbytes // max(1, self.slot_bytes))


NO_SLOTS = Slots()


class Needs(NamedTuple):
    """The range in which memory makes a difference to a model.

    Attributes:
        least_bytes: The least memory with which it works.
        most_bytes: Memory beyond which more is of no use.
        why: What needs the least memory, in words.
    """

    least_bytes: int
    most_bytes: int
    why: str


def shared_out(
    units: list[Unit], memory_bytes: int, held_bytes: int = 0, slots: Slots = NO_SLOTS
) -> MemoryShares:
    """Divides a model's memory.

    Units are used in a circle, so the one used last is needed last, and a resident byte saves one
    byte of each pass, whichever unit it belongs to. Modules beside the blocks stay first, the small
    before the large; then as many blocks as fit, evenly among the others, so that reading never
    pauses for long. Memory that is left goes to experts: a pass needs only some of them, so a byte
    saves less there.

    Args:
        units: The units, in their order.
        memory_bytes: Memory for all weights.
        held_bytes: Bytes of it for weights that are already in memory, and stay.
        slots: The slots that experts can use.
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
        return MemoryShares(frozenset(range(len(units))), sum(sizes), 0, held_bytes, slot_count)
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
        passing -= _evenly_spread({index: sizes[index] for index in blocks}, left - ring_bytes)
    resident = set(range(len(units))) - passing
    resident_bytes = sum(sizes[index] for index in resident)
    slot_count = slots.count_in(memory_bytes - held_bytes - resident_bytes - ring_bytes)
    return MemoryShares(frozenset(resident), resident_bytes, ring_bytes, held_bytes, slot_count)


def needs_of(units: list[Unit], held_bytes: int, slots: Slots = NO_SLOTS) -> Needs:
    """The least and the most memory that a model can use."""
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
    """Units whose calls enclose calls of others: they cannot be dropped before these."""
    return {
        index
        for index, unit in enumerate(units)
        if not unit.is_block and any(unit.encloses(other) for other in units)
    }


def _evenly_spread(sizes: dict[int, int], room_bytes: int) -> set[int]:
    """Picks indices whose sizes fit into some room, as many bytes of each part of the order."""
    total_bytes = sum(sizes.values())
    picked: set[int] = set()
    passed_bytes = picked_bytes = 0
    for index, nbytes in sizes.items():
        passed_bytes += nbytes
        if picked_bytes + nbytes <= room_bytes * passed_bytes // total_bytes:
            picked.add(index)
            picked_bytes += nbytes
    # Smaller ones may fit into the rest.
    for index in sorted(sizes.keys() - picked, key=lambda index: (-sizes[index], index)):
        if picked_bytes + sizes[index] <= room_bytes:
            picked.add(index)
            picked_bytes += sizes[index]
    return picked
