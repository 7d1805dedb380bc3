"""The experts of a model: their parameters, and where each expert's bytes are in the files."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.io.files.extents import Arrangement, Composed, ParameterPart, TensorExtent
from penstock.offload.streaming.weights.placeholder import placeholder
from penstock.offload.streaming.weights.shares import Slots
from penstock.offload.streaming.weights.units import PAGE_BYTES, ReadSpan, whole_pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Part(NamedTuple):
    """The place of a stored tensor in the memory of an expert.

    Attributes:
        piece: The tensor.
        place: Offset in the memory at which it is read, in bytes.
    """

    piece: ParameterPart
    place: int


@dataclass(frozen=True, slots=True)
class Slab:
    """One expert's matrix of a parameter, read and evicted as a whole.

    Attributes:
        number: Number of the expert, counted over the whole model.
        name: Name of the parameter in the model.
        shape: Shape of the matrix.
        dtype: Its type in the model.
        place: Offset of the matrix in its memory, in bytes.
        parts: The stored tensors of which it is made.
        is_converted: Whether the parts are copied to the matrix, being stored in another type or
            order.
        spans: The file ranges to read.
        nbytes: Memory that it needs, in bytes.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: Any
    place: int
    parts: tuple[Part, ...]
    is_converted: bool
    spans: tuple[ReadSpan, ...]
    nbytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(part.piece.stored.nbytes for part in self.parts)

    def tensor(self, memory: Any) -> Any:
        """The matrix as a tensor, once its bytes are read into ``memory``."""
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
        """Name of the stored tensor that holds a byte of a file, or of the first behind it."""
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
    """A module with experts, called with the experts that the router chose.

    Attributes:
        name: Its name in the model.
        module: The module, which has the parameters of all its experts.
        first: Number of its first expert, counted over the whole model.
        count: The number of its experts.
        slabs: For each streamed parameter, the matrices of its experts.
    """

    name: str
    module: Any
    first: int
    count: int
    slabs: Mapping[str, tuple[Slab, ...]]

    @property
    def names(self) -> set[str]:
        """Names of the streamed parameters in the model."""
        return {f"{self.name}.{attribute}" for attribute in self.slabs}

    def empty(self, device: Any) -> None:
        """Replaces the streamed parameters with placeholders, which frees their memory."""
        for attribute in self.slabs:
            one = self.module._parameters[attribute]
            name = f"{self.name}.{attribute}"
            self.module._parameters[attribute] = placeholder(
                name, tuple(one.shape), one.dtype, device
            )


def mixtures_of(
    model: Any, stored: Mapping[str, TensorExtent | Composed], *, is_on_device: bool = False
) -> list[Mixture]:
    """Finds the modules that call experts through the experts interface of transformers."""
    found: list[Mixture] = []
    first = 0
    for name, module in model.named_modules():
        # Attributes set by the decorator of transformers for modules called with routed experts.
        if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
            continue
        slabs = {}
        for attribute, parameter in module._parameters.items():
            one = stored.get(f"{name}.{attribute}")
            # Biases are small, and are read with the block.
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
    """The number of experts, and the bytes that fit any one of them."""
    return Slots(sum(one.count for one in mixtures), sum(slab_sizes_of(mixtures).values()))


def slab_sizes_of(mixtures: Sequence[Mixture]) -> dict[str, int]:
    """For each parameter, the bytes that fit any expert's matrix."""
    sizes: dict[str, int] = {}
    for mixture in mixtures:
        for attribute, slabs in mixture.slabs.items():
            largest = max(slab.nbytes for slab in slabs)
            sizes[attribute] = max(sizes.get(attribute, 0), largest)
    return sizes


def _cut(name: str, whole: TensorExtent) -> Sequence[tuple[ParameterPart, ...]] | None:
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
    return [(ParameterPart(name, replace(part, arrangement=inner)),) for part in parts]


def _laid_out(
    number: int, name: str, parameter: Any, pieces: Sequence[ParameterPart], is_on_device: bool
) -> Slab:
    """Lays out pieces in memory at the same offset within a page as in their file, where possible.

    On a device they begin at a page: bytes are copied from other memory anyway, and kernels need
    multiples of 16 bytes, where file headers end at multiples of 8.
    """
    shape, dtype = tuple(parameter.shape[1:]), parameter.dtype
    spans: list[ReadSpan] = []
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
    pieces: Sequence[ParameterPart], spans: list[ReadSpan], room: int, is_on_device: bool
) -> tuple[list[Part], int]:
    """Places pieces from a page on, and adds their spans; returns the parts and the next page."""
    first = pieces[0].stored
    # Elements must be aligned to their type; pieces unaligned in the file are copied.
    is_even = first.offset % int(first.dtype.itemsize) == 0
    inside = first.offset % PAGE_BYTES if is_even and not is_on_device else 0
    spans.append(ReadSpan(first.path, first.offset - inside, inside, room))
    place = room + inside
    placed: list[Part] = []
    for piece in pieces:
        placed.append(Part(piece, place))
        for run in piece.stored.runs:
            last = spans[-1]
            if (run.path, run.offset) == (last.path, last.offset + last.nbytes):
                spans[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
            else:
                spans.append(ReadSpan(*run, place))
            place += run.nbytes
    return placed, whole_pages(place)
