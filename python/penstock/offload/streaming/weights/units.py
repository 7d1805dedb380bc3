"""Units of a model, read, bound and dropped together: its blocks, and modules beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.io.files.extents import TensorExtent

PAGE_BYTES = 4096
_GAP_BYTES_MAX = 256 << 10
"""Largest gap between two tensors that is read with them. It is also at most a `_GAP_PART`th of the
bytes before it, as it takes memory as well as time."""
_GAP_PART = 8
_ALIGNED_BYTES = 16
"""Alignment of weights in a device's memory, in bytes; in files they are aligned to 8, as headers
are. Kernels for a smaller alignment are slower, and their bits may differ."""


class ModuleParameter(NamedTuple):
    """A parameter of a module, and the location of its bytes.

    Attributes:
        name: Its name in the model.
        module: The module.
        attribute: Its name in the module.
        stored: Location of its bytes.
        dtype: Its type in the model.
    """

    name: str
    module: Any
    attribute: str
    stored: TensorExtent
    dtype: Any

    @property
    def is_converted(self) -> bool:
        """Whether it is stored in another type or order."""
        return bool(self.stored.dtype != self.dtype or self.stored.arrangement)


class ReadSpan(NamedTuple):
    """A file range read at a time.

    Attributes:
        path: The file.
        offset: Begin of the range, in bytes; at a page where possible.
        nbytes: Its length.
        place: Offset in the unit's memory; on the host the same offset within a page as in the
            file.
    """

    path: str
    offset: int
    nbytes: int
    place: int


@dataclass(eq=False)
class Unit:
    """Modules whose parameters are loaded and dropped together.

    Attributes:
        name: Name of the first of its modules.
        modules: Modules whose calls need the parameters. Modules that share a tensor form one unit,
            which is no block then.
        seats: Their parameters, including those of their children.
        is_block: Whether it is one of the model's blocks.
        is_on_device: Whether the weights go to a device.
        spans: The file ranges to read.
        nbytes: Memory that it needs, in bytes.
        places: Offset in that memory of each seat's tensor as stored.
        converted: Offset in that memory of each tensor that the model needs in another type or
            order.
    """

    name: str
    modules: list[Any]
    seats: list[ModuleParameter]
    is_block: bool
    is_on_device: bool = False
    spans: list[ReadSpan] = field(init=False)
    nbytes: int = field(init=False)
    places: list[int] = field(init=False)
    converted: dict[TensorExtent, int] = field(init=False)

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
        """Whether a call of this unit may call the other one."""
        inside = {id(one) for module in self.modules for one in module.modules()}
        return other is not self and any(id(module) in inside for module in other.modules)

    @property
    def tensors(self) -> set[TensorExtent]:
        """The stored tensors of the unit."""
        return {seat.stored for seat in self.seats}

    @property
    def weight_bytes(self) -> int:
        """Bytes of its tensors, each counted once."""
        return sum(one.nbytes for one in self.tensors)


def _laid_out(
    tensors: list[TensorExtent], is_on_device: bool
) -> tuple[list[ReadSpan], list[int], int]:
    """Spans that cover tensors, the offset of each tensor in memory, and the bytes of memory."""
    spans: list[ReadSpan] = []
    places: dict[TensorExtent, int] = {}
    room = 0
    group: list[TensorExtent] = []

    def close() -> None:
        nonlocal room
        if not group:
            return
        # Elements must be aligned to their type; tensors unaligned in the file are copied.
        is_even = all(one.offset % one.dtype.itemsize == 0 for one in group)
        begin = group[0].offset
        inside = begin % PAGE_BYTES if is_even and not is_on_device else 0
        end = max(one.end for one in group)
        spans.append(ReadSpan(group[0].path, begin - inside, end - begin + inside, room))
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
            spans.append(ReadSpan(run.path, run.offset, run.nbytes, room))
            room += run.nbytes
        room = whole_pages(room)
    return spans, [places[one] for one in tensors], room


def _is_near(group: list[TensorExtent], one: TensorExtent) -> bool:
    last = group[-1]
    gap_bytes_max = min(_GAP_BYTES_MAX, (last.end - group[0].offset) // _GAP_PART)
    if one.path != last.path or not 0 <= one.offset - last.end <= max(PAGE_BYTES, gap_bytes_max):
        return False
    return all(each.offset % each.dtype.itemsize == 0 for each in (last, one))


def _is_aligned(group: list[TensorExtent], one: TensorExtent, is_on_device: bool) -> bool:
    return not is_on_device or (one.offset - group[0].offset) % _ALIGNED_BYTES == 0


def whole_pages(nbytes: int) -> int:
    """Rounds bytes up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def units_of(
    model: Any,
    blocks: Iterable[str],
    stored: Mapping[str, TensorExtent],
    *,
    is_on_device: bool = False,
) -> list[Unit]:
    """The units of a model in the likely order of their use, that of their declaration.

    Args:
        model: A module.
        blocks: Names of the modules that form a unit with everything inside.
        stored: Location of each parameter's bytes, by its name; other parameters stay as they are.
        is_on_device: Whether the weights go to a device.
    """
    owners = set(blocks)
    units: list[Unit] = []
    holders: dict[TensorExtent, Unit] = {}
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
    name: str, module: Any, stored: Mapping[str, TensorExtent], *, is_deep: bool
) -> Iterator[ModuleParameter]:
    inner = module.named_modules() if is_deep else [("", module)]
    for inside, one in inner:
        prefix = ".".join(part for part in (name, inside) if part)
        for attribute, parameter in one._parameters.items():
            full = f"{prefix}.{attribute}" if prefix else attribute
            if (found := stored.get(full)) is not None:
                yield ModuleParameter(full, one, attribute, found, parameter.dtype)
