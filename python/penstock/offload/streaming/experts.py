"""The experts of a model: which parameters they have parts of, and where each one's bytes lie."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.io.extents import Arrangement, Composed, Piece, Stored
from penstock.offload.streaming.placeholder import placeholder
from penstock.offload.streaming.shares import Slots
from penstock.offload.streaming.units import PAGE_BYTES, Span, whole_pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Part(NamedTuple):
    """Where in the memory of an expert a tensor of the files is.

    Attributes:
        piece: The tensor.
        place: Where its bytes are read to.
    """

    piece: Piece
    place: int


@dataclass(frozen=True, slots=True)
class Slab:
    """What one expert has of a parameter: a matrix, which is read and let go as a whole.

    Attributes:
        number: Of the expert, among all of the model.
        name: Of the parameter in the model.
        shape: Its sizes.
        dtype: The type that the model has it in.
        place: Where it begins in its memory.
        parts: What it is made of.
        is_converted: Whether the parts do not lie where it is, as they are stored otherwise.
        spans: What is read.
        nbytes: Memory that it takes.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: Any
    place: int
    parts: tuple[Part, ...]
    is_converted: bool
    spans: tuple[Span, ...]
    nbytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.piece.stored.nbytes for part in self.parts)

    def tensor(self, memory: Any) -> Any:
        """The matrix, once its bytes are in its memory."""
        nbytes = math.prod(self.shape) * int(self.dtype.itemsize)
        values = memory[self.place : self.place + nbytes].view(self.dtype).view(self.shape)
        begin = 0
        for piece, place in self.parts if self.is_converted else ():
            stored = piece.stored
            raw = memory[place : place + stored.nbytes].view(stored.dtype).view(stored.shape)
            end = begin + stored.shape_in_model[0]
            stored.fill(values[begin:end], raw)
            begin = end
        return values

    def named(self, path: str, offset: int) -> str:
        """The tensor of the files that has a byte of one, or the first behind it."""
        behind = [
            (run.offset, part.piece.name)
            for part in self.parts
            for run in part.piece.stored.runs
            if run.path == path and run.offset + run.nbytes > offset
        ]
        key = min(behind, default=(0, self.parts[0].piece.name))[1]
        return self.name if key == self.name else f"{self.name} ({key!r})"


@dataclass(eq=False, slots=True)
class Mixture:
    """A module whose calls say which of its experts they need.

    Attributes:
        name: In the model.
        module: It has the parameters of all of its experts.
        first: The number of its first expert, among all of the model.
        count: How many it has.
        slabs: Of each parameter whose matrices come and go one by one, those of the experts.
    """

    name: str
    module: Any
    first: int
    count: int
    slabs: Mapping[str, tuple[Slab, ...]]

    @property
    def names(self) -> set[str]:
        """The parameters' names in the model."""
        return {f"{self.name}.{attribute}" for attribute in self.slabs}

    def empty(self, device: Any) -> None:
        """Gives up what memory the parameters have.

        Args:
            device: Where their matrices come.
        """
        for attribute in self.slabs:
            one = self.module._parameters[attribute]
            name = f"{self.name}.{attribute}"
            self.module._parameters[attribute] = placeholder(
                name, tuple(one.shape), one.dtype, device
            )


def mixtures_of(
    model: Any, stored: Mapping[str, Stored | Composed], *, is_on_device: bool = False
) -> list[Mixture]:
    """The modules of a model that call experts through the interface of transformers for them.

    Args:
        model: A module.
        stored: Where each parameter's bytes lie, by its name.
        is_on_device: Whether a device computes with them.
    """
    found: list[Mixture] = []
    first = 0
    for name, module in model.named_modules():
        # What the decorator of transformers gives a module, whose calls get the routed experts.
        if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
            continue
        slabs = {}
        for attribute, parameter in module._parameters.items():
            one = stored.get(f"{name}.{attribute}")
            # Biases are small, and come with the block.
            if one is None or parameter.ndim != 3 or len(parameter) != module.num_experts:
                continue
            pieces = one.slabs if isinstance(one, Composed) else _cut(f"{name}.{attribute}", one)
            if pieces is not None:
                slabs[attribute] = tuple(
                    _laid_out(first + at, f"{name}.{attribute}", parameter, each, is_on_device)
                    for at, each in enumerate(pieces)
                )
        if slabs:
            found.append(Mixture(name, module, first, module.num_experts, slabs))
            first += module.num_experts
    return found


def slots_of(mixtures: Sequence[Mixture]) -> Slots:
    """Room for any expert, and how many there are."""
    return Slots(sum(one.count for one in mixtures), sum(slab_sizes_of(mixtures).values()))


def slab_sizes_of(mixtures: Sequence[Mixture]) -> dict[str, int]:
    """Memory that has room for any matrix of each parameter."""
    sizes: dict[str, int] = {}
    for mixture in mixtures:
        for attribute, slabs in mixture.slabs.items():
            largest = max(slab.nbytes for slab in slabs)
            sizes[attribute] = max(sizes.get(attribute, 0), largest)
    return sizes


def _cut(name: str, whole: Stored) -> Sequence[tuple[Piece, ...]] | None:
    """The parts of a tensor along its first dimension; None where their elements are mixed."""
    count, *rest = whole.shape
    how = whole.arrangement
    inner = None
    if how is not None:
        if how.order[0] != 0 or not how.view[0] == how.shape[0] == count:
            return None
        inner = Arrangement(how.view[1:], tuple(one - 1 for one in how.order[1:]), how.shape[1:])
    nbytes = whole.nbytes // max(1, count)
    parts = [whole.part(at * nbytes, tuple(rest)) for at in range(count)]
    return [(Piece(name, replace(part, arrangement=inner)),) for part in parts]


def _laid_out(
    number: int, name: str, parameter: Any, pieces: Sequence[Piece], is_on_device: bool
) -> Slab:
    """Lays pieces as far from a page as they are in their file, where that may be.

    A device's begin at a page: what is read comes from other memory, and kernels want multiples of
    16 bytes, which headers of files are not.
    """
    shape, dtype = tuple(parameter.shape[1:]), parameter.dtype
    spans: list[Span] = []
    if all(one.stored.dtype == dtype and one.stored.arrangement is None for one in pieces):
        parts, nbytes = _one_behind_the_other(pieces, spans, 0, is_on_device)
        place = parts[0].place
        return Slab(number, name, shape, dtype, place, tuple(parts), False, tuple(spans), nbytes)
    parts, place = [], 0
    for piece in pieces:
        found, place = _one_behind_the_other([piece], spans, place, is_on_device)
        parts += found
    nbytes = whole_pages(place + math.prod(shape) * int(dtype.itemsize))
    return Slab(number, name, shape, dtype, place, tuple(parts), True, tuple(spans), nbytes)


def _one_behind_the_other(
    pieces: Sequence[Piece], spans: list[Span], room: int, is_on_device: bool
) -> tuple[list[Part], int]:
    """Places pieces from a page on; says where the next page is, and adds what is read."""
    first = pieces[0].stored
    # Elements have to lie where their type may lie; files that do not care are copied from.
    is_even = first.offset % int(first.dtype.itemsize) == 0
    inside = first.offset % PAGE_BYTES if is_even and not is_on_device else 0
    spans.append(Span(first.path, first.offset - inside, inside, room))
    place = room + inside
    placed: list[Part] = []
    for piece in pieces:
        placed.append(Part(piece, place))
        for run in piece.stored.runs:
            last = spans[-1]
            if (run.path, run.offset) == (last.path, last.offset + last.nbytes):
                spans[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
            else:
                spans.append(Span(*run, place))
            place += run.nbytes
    return placed, whole_pages(place)
