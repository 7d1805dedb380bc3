"""`InFile`: one tensor that ``load(into=…)`` puts into a file, a piece at a time.

Whoever has the file says which box of the tensor comes next, and has the memory for it. So a load
holds no more of what it puts into files than they ask for at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.layout.boxes import Box
from penstock.layout.sharding import boxes_of
from penstock.loading.fetch import merged, whole_request
from penstock.state.build import Builder
from penstock.state.file_tensor import FileTarget, FileTensor
from penstock.state.linked import place_of, type_of
from penstock.state.memory import CPU, narrow, of_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import _native
    from penstock.loading.view import View
    from penstock.state.ties import Window
    from penstock.state.tree import Node


@dataclass(slots=True)
class InFile:
    """A tensor that comes into a file.

    Attributes:
        name: Its dotted name.
        value: The tensor in a file whose place it takes, or where it goes.
        node: The leaf it is filled from.
        index: The stored tensor of that leaf.
        window: Which part of it.
        boxes: What this rank holds of it.
    """

    name: str
    value: FileTensor | FileTarget
    node: dict[str, Node]
    index: int
    window: Window | None
    boxes: list[Box]

    @property
    def place(self) -> object:
        """The same for values that are one and the same."""
        return place(self.value)

    @property
    def origin(self) -> object:
        """The same for what is filled from the same elements."""
        return (self.index, self.window)

    def target(self) -> FileTarget:
        """Where it goes."""
        value = self.value
        return value.file.target(value) if isinstance(value, FileTensor) else value


def place(value: FileTensor | FileTarget) -> object:
    """The same for values that are one and the same."""
    return place_of(value) if isinstance(value, FileTensor) else id(value)


def is_in_file(value: Any) -> bool:
    """Whether it is a tensor in a file, or a place for one."""
    return isinstance(value, FileTensor | FileTarget)


def description(
    value: FileTensor | FileTarget, name: str
) -> tuple[str, tuple[int, ...], list[Box]]:
    """Type and shape of the tensor, whole, and what this rank holds of it.

    Raises:
        UnsupportedStateError: Nothing of that type or layout is stored.
    """
    dtype, _ = type_of(value, name)
    shape = tuple(value.shape)
    if value.like is None:
        zeros = (0,) * len(shape)
        return dtype, shape, [Box(zeros, shape, zeros)]
    return dtype, tuple(value.like.shape), boxes_of(value.like, shape, name)


class Filling:
    """Puts tensors of a checkpoint into files.

    Args:
        checkpoint: The checkpoint, open.
        seen: The view of it that indices belong to.
        options: How bytes move.

    Attributes:
        fields: Of the `LoadReport`, of everything that was read; None before anything was.
    """

    def __init__(self, checkpoint: _native.Checkpoint, seen: View, options: dict[str, Any]) -> None:
        self.fields: dict[str, Any] | None = None
        self._checkpoint = checkpoint
        self._seen = seen
        self._options = options

    def fill(self, one: InFile) -> FileTensor:
        """Fills a file.

        Raises:
            CorruptCheckpointError: The bytes of the tensor are damaged.
        """
        target = one.target()
        source = None if one.window is None else self._window(one)
        return target.fill(lambda memory, start: self._read(one, source, memory, start))

    def _read(self, one: InFile, source: Any, memory: Any, start: tuple[int, ...]) -> None:
        """Fills memory with a box of what this rank holds, and with nothing else."""
        place = of_tensor(memory, one.name)
        dtype, item_bytes = type_of(one.value, one.name)
        shape = tuple(memory.shape)
        parts = list(_parts(one.boxes, tuple(start), shape))
        is_within = sum(math.prod(part.shape) for part, _ in parts) == math.prod(shape)
        is_plain = place.strides is None and place.device == CPU and place.dtype == dtype
        if not is_within or not is_plain:
            raise ValueError(
                f"{one.name}: {shape} of {place.dtype} at {tuple(start)} is no contiguous box of "
                f"{tuple(one.value.shape)} of {dtype}"
            )
        if not math.prod(shape):
            return
        if source is not None:
            for part, at in parts:
                _slice(memory, at, part.shape).copy_(_slice(source, part.start, part.shape))
            return
        key = self._seen.wholes.get(one.index, one.index)
        requests: list[_native._Fill] = []
        for part, at in parts:
            inner = narrow(place, at, part.shape)
            where = (inner.address, inner.strides, item_bytes, inner.owner)
            requests.append((key, part.start, part.shape, *where))
        self._note(self._checkpoint.fill(requests, options=self._options, progress=None))

    def _window(self, one: InFile) -> Any:
        """A part of a stored tensor with strides of its own, whole in memory."""
        row = self._seen.tensors[one.index]
        places = {}
        if row[4] != row[5]:
            key = self._seen.wholes.get(one.index, one.index)
            memory, request = whole_request(key, row)
            self._note(self._checkpoint.fill([request], options=self._options, progress=None))
            places[one.index] = (memory, 0)
        return Builder(self._seen.tensors, self._seen.aliases, places).build(one.node)

    def _note(self, fields: dict[str, Any]) -> None:
        self.fields = fields if self.fields is None else merged([self.fields, fields])


def _parts(
    boxes: list[Box], start: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """What a block of the local tensor has of each box, and where that begins in the block."""
    for box in boxes:
        lows = tuple(map(max, box.at, start))
        highs = [
            min(at + size, first + length)
            for at, size, first, length in zip(box.at, box.shape, start, shape, strict=True)
        ]
        sizes = tuple(max(high - low, 0) for low, high in zip(lows, highs, strict=True))
        if 0 not in sizes:
            first = tuple(
                begin + low - at for begin, low, at in zip(box.start, lows, box.at, strict=True)
            )
            yield Box(first, sizes, lows), tuple(map(int.__sub__, lows, start))


def _slice(tensor: Any, at: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    return tensor[tuple(slice(low, low + size) for low, size in zip(at, shape, strict=True))]
