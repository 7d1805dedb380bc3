"""What of a model is read, bound and let go together: its blocks, and what stands beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.io.extents import Stored

PAGE_BYTES = 4096
_GAP_BYTES_MAX = 256 << 10
"""What lies between two tensors is read with them, if it is not more, nor more than a part of what
lies before: it takes memory as well as time."""
_GAP_PART = 8
_ALIGNED_BYTES = 16
"""Weights begin at multiples of so many bytes in a device's memory, wherever they begin in files,
whose headers end at multiples of 8. Kernels that take less are slower; their bits may differ."""


class Seat(NamedTuple):
    """A parameter of a module, and where its bytes lie.

    Attributes:
        name: In the model.
        module: That has it.
        attribute: Its name there.
        stored: Its bytes.
        dtype: The type that the model has it in.
    """

    name: str
    module: Any
    attribute: str
    stored: Stored
    dtype: Any

    @property
    def is_converted(self) -> bool:
        """Whether it is stored as another type, or otherwise arranged."""
        return bool(self.stored.dtype != self.dtype or self.stored.arrangement)


class Span(NamedTuple):
    """Bytes that are read at a time.

    Attributes:
        path: The file.
        offset: Where in it they begin, at a page where it may be so.
        nbytes: How many.
        place: Where they go in the memory of the unit: on the host as far from a page as in the
            file.
    """

    path: str
    offset: int
    nbytes: int
    place: int


@dataclass(eq=False)
class Unit:
    """A module whose parameters come and go together.

    Attributes:
        name: Of the first of its modules.
        modules: Their calls are when the parameters have to be there. More than one where they
            share a tensor; they are no block then.
        seats: Its parameters, those of its children included.
        is_on_device: Whether a device computes with them.
        spans: What is read.
        nbytes: Memory that it takes.
        places: Where each seat's tensor begins in that memory, as it is stored.
        converted: Where those begin that the model has in another type, or otherwise arranged.
    """

    name: str
    modules: list[Any]
    seats: list[Seat]
    is_block: bool
    is_on_device: bool = False
    spans: list[Span] = field(init=False)
    nbytes: int = field(init=False)
    places: list[int] = field(init=False)
    converted: dict[Stored, int] = field(init=False)

    def __post_init__(self) -> None:
        tensors = [seat.stored for seat in self.seats]
        self.spans, self.places, self.nbytes = _laid_out(tensors, self.is_on_device)
        self.converted = {}
        for seat in self.seats:
            if seat.is_converted and seat.stored not in self.converted:
                self.converted[seat.stored] = self.nbytes
                nbytes = math.prod(seat.stored.shape) * seat.dtype.itemsize
                self.nbytes += whole_pages(nbytes)

    def encloses(self, other: Unit) -> bool:
        """Whether a call of it may call the other one."""
        inside = {id(one) for module in self.modules for one in module.modules()}
        return other is not self and any(id(module) in inside for module in other.modules)

    @property
    def tensors(self) -> set[Stored]:
        """What is stored of it."""
        return {seat.stored for seat in self.seats}

    @property
    def weight_bytes(self) -> int:
        """Bytes of its tensors, each once."""
        return sum(one.nbytes for one in self.tensors)


def _laid_out(tensors: list[Stored], is_on_device: bool) -> tuple[list[Span], list[int], int]:
    """Spans over tensors, where each tensor lies in their memory, and how much memory that is."""
    spans: list[Span] = []
    places: dict[Stored, int] = {}
    room = 0
    group: list[Stored] = []

    def close() -> None:
        nonlocal room
        if not group:
            return
        # Elements have to lie where their type may lie; files that do not care are copied from.
        is_even = all(one.offset % one.dtype.itemsize == 0 for one in group)
        begin = group[0].offset
        inside = begin % PAGE_BYTES if is_even and not is_on_device else 0
        end = max(one.end for one in group)
        spans.append(Span(group[0].path, begin - inside, end - begin + inside, room))
        for one in group:
            places[one] = room + inside + one.offset - begin
        room = whole_pages(room + inside + end - begin)
        group.clear()

    whole = {one for one in tensors if len(one.runs) == 1}
    for one in sorted(whole, key=lambda one: (one.path, one.offset)):
        if group and not (_is_near(group, one) and _is_aligned(group, one, is_on_device)):
            close()
        group.append(one)
    close()
    for one in dict.fromkeys(tensors):
        if one in places:
            continue
        places[one] = room
        for run in one.runs:
            spans.append(Span(run.path, run.offset, run.nbytes, room))
            room += run.nbytes
        room = whole_pages(room)
    return spans, [places[one] for one in tensors], room


def _is_near(group: list[Stored], one: Stored) -> bool:
    last = group[-1]
    gap_bytes_max = min(_GAP_BYTES_MAX, (last.end - group[0].offset) // _GAP_PART)
    if one.path != last.path or not 0 <= one.offset - last.end <= max(PAGE_BYTES, gap_bytes_max):
        return False
    return all(each.offset % each.dtype.itemsize == 0 for each in (last, one))


def _is_aligned(group: list[Stored], one: Stored, is_on_device: bool) -> bool:
    return not is_on_device or (one.offset - group[0].offset) % _ALIGNED_BYTES == 0


def whole_pages(nbytes: int) -> int:
    """So many bytes, up to the end of a page."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def units_of(
    model: Any, blocks: Iterable[str], stored: Mapping[str, Stored], *, is_on_device: bool = False
) -> list[Unit]:
    """The units of a model, as it is likely to use them: as they are declared.

    Args:
        model: A module.
        blocks: Names of the modules that are units with all that is in them.
        stored: Where each parameter's bytes lie, by its name; those without stay as they are.
        is_on_device: Whether a device computes with them.
    """
    owners = set(blocks)
    units: list[Unit] = []
    holders: dict[Stored, Unit] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{owner}.") for owner in owners):
            continue
        seats = list(_seats(name, module, stored, is_deep=name in owners))
        if not seats:
            continue
        unit = Unit(name, [module], seats, name in owners, is_on_device)
        while other := next((holders[one] for one in unit.tensors if one in holders), None):
            units.remove(other)
            for one in other.tensors:
                del holders[one]
            modules, seats = other.modules + unit.modules, other.seats + unit.seats
            unit = Unit(other.name, modules, seats, False, is_on_device)
        units.append(unit)
        holders.update(dict.fromkeys(unit.tensors, unit))
    return units


def _seats(
    name: str, module: Any, stored: Mapping[str, Stored], *, is_deep: bool
) -> Iterator[Seat]:
    inner = module.named_modules() if is_deep else [("", module)]
    for inside, one in inner:
        prefix = ".".join(part for part in (name, inside) if part)
        for attribute, parameter in one._parameters.items():
            full = f"{prefix}.{attribute}" if prefix else attribute
            if (found := stored.get(full)) is not None:
                yield Seat(full, one, attribute, found, parameter.dtype)
