"""`InFile`: a tensor that ``load(into=…)`` writes to a file, block by block with others.

The owner of the files requests boxes of the tensors in its own order and provides the memory. A
load therefore holds no more of these tensors than the owner requests at a time, and reads many
small tensors at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.layout.boxes import Box
from penstock.checkpoint.layout.sharding import boxes_of
from penstock.checkpoint.loading.fetch import merged, whole_request
from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.linked import place_of, type_of
from penstock.tensors.file_tensor import FileTarget, FileTensor
from penstock.tensors.memory import contiguous_strides
from penstock.tensors.native_rows import Fill

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock import _native
    from penstock.checkpoint.state.tree.references import Window
    from penstock.checkpoint.state.tree.tree import Node
    from penstock.checkpoint.view.view import View
    from penstock.tensors.file_tensor import FileBox, Filler


@dataclass(slots=True)
class InFile:
    """A tensor that is loaded into a file.

    Attributes:
        name: Its dotted name.
        value: The file tensor that it replaces, or its target.
        node: The leaf of the checkpoint's tree.
        index: The stored tensor of that leaf.
        window: The part of the stored tensor; None for the whole.
        boxes: The boxes that this rank holds.
    """

    name: str
    value: FileTensor | FileTarget
    node: dict[str, Node]
    index: int
    window: Window | None
    boxes: list[Box]

    @property
    def place(self) -> object:
        """A key that is equal for values in the same place."""
        return place(self.value)

    @property
    def origin(self) -> object:
        """A key that is equal for tensors filled from the same elements."""
        return (self.index, self.window)

    def target(self) -> FileTarget:
        """Returns the target of the tensor."""
        value = self.value
        return value.file.target(value) if isinstance(value, FileTensor) else value


def place(value: FileTensor | FileTarget) -> object:
    """Returns a key that is equal for values in the same place."""
    return place_of(value) if isinstance(value, FileTensor) else id(value)


def is_in_file(value: Any) -> bool:
    """Whether a value is a tensor in a file, or a target for one."""
    return isinstance(value, FileTensor | FileTarget)


def description(
    value: FileTensor | FileTarget, name: str
) -> tuple[str, tuple[int, ...], list[Box]]:
    """Returns the type and the shape of the whole tensor, and the boxes that this rank holds."""
    dtype, _ = type_of(value, name)
    shape = tuple(value.shape)
    if value.like is None:
        zeros = (0,) * len(shape)
        return dtype, shape, [Box(zeros, shape, zeros)]
    return dtype, tuple(value.like.shape), boxes_of(value.like, shape, name)


class Filling:
    """Loads tensors of a checkpoint into files.

    Attributes:
        fields: Fields of the `LoadReport` for everything read; None before the first read.
    """

    def __init__(self, checkpoint: _native.Checkpoint, seen: View, options: dict[str, Any]) -> None:
        self.fields: dict[str, Any] | None = None
        self._checkpoint = checkpoint
        self._seen = seen
        self._options = options
        self._last: tuple[InFile, Any] | None = None

    def fill(self, wanted: Iterable[InFile]) -> dict[object, FileTensor]:
        """Fills the files; of the tensors with the same `place`, one is filled.

        Returns:
            The new file tensors, by place.
        """
        once: dict[object, InFile] = {}
        for one in wanted:
            once.setdefault(one.place, one)
        # Targets are requested in the order of the state, which keeps related tensors together.
        pairs = [(one, one.target()) for one in once.values()]
        pairs.sort(key=lambda pair: self._position(pair[0]))
        shares: dict[Filler, list[tuple[InFile, FileTarget]]] = {}
        for pair in pairs:
            shares.setdefault(pair[1].filler, []).append(pair)
        found: dict[object, FileTensor] = {}
        for filler, share in shares.items():
            ones = [one for one, _ in share]
            made = filler.fill([target for _, target in share], partial(self._read, ones))
            found.update(zip((one.place for one in ones), made, strict=True))
        return found

    def _position(self, one: InFile) -> tuple[bool, str, int]:
        """Returns a tensor's stored position: neighbours share chunks, which are then read once."""
        if one.window is not None or one.index in self._seen.wholes:
            return True, "", 0
        entry = self._seen.tensors[one.index]
        return False, entry.file, entry.begin

    def _read(self, ones: Sequence[InFile], memory: Any, boxes: Sequence[FileBox]) -> None:
        """Fills memory with boxes of this rank's tensors in one read."""
        requests: list[Fill] = []
        address, room = memory.data_ptr(), memory.numel()
        for box in boxes:
            one = ones[box.target]
            _, item_bytes = type_of(one.value, one.name)
            count = math.prod(box.shape)
            parts = list(_parts(one.boxes, box.start, box.shape))
            is_within = sum(math.prod(part.shape) for part, _ in parts) == count
            if not is_within or not 0 <= box.place <= room - count * item_bytes:
                raise ValueError(
                    f"{one.name}: {box.shape} at {box.start} is no box of {tuple(one.value.shape)},"
                    f" or does not fit into {room} bytes at {box.place}"
                )
            if one.window is not None:
                self._copy(one, box, memory[box.place : box.place + count * item_bytes], parts)
                continue
            key = self._seen.wholes.get(one.index, one.index)
            for part, at in parts:
                strides, first = None, address + box.place
                if part.shape != box.shape:
                    strides = contiguous_strides(box.shape, item_bytes)
                    first += sum(map(int.__mul__, at, strides))
                where = (first, strides, item_bytes, memory, None)
                requests.append(Fill(key, part.start, part.shape, *where))
        if requests:
            self._note(self._checkpoint.fill(requests, options=self._options, progress=None))

    def _copy(
        self, one: InFile, box: FileBox, memory: Any, parts: list[tuple[Box, tuple[int, ...]]]
    ) -> None:
        """Fills memory with parts of a strided window."""
        # The boxes of a tensor follow each other, so one such tensor is in memory at a time.
        if self._last is None or self._last[0] is not one:
            self._last = None
            self._last = one, self._window(one)
        source = self._last[1]
        block = memory.view(source.dtype).view(box.shape)
        for part, at in parts:
            _slice(block, at, part.shape).copy_(_slice(source, part.start, part.shape))

    def _window(self, one: InFile) -> Any:
        """Returns a strided part of a stored tensor, read whole into memory."""
        entry = self._seen.tensors[one.index]
        places = {}
        if entry.begin != entry.end:
            key = self._seen.wholes.get(one.index, one.index)
            memory, request = whole_request(key, entry)
            self._note(self._checkpoint.fill([request], options=self._options, progress=None))
            places[one.index] = (memory, 0)
        return Builder(self._seen.tensors, self._seen.aliases, places).build(one.node)

    def _note(self, fields: dict[str, Any]) -> None:
        self.fields = fields if self.fields is None else merged([self.fields, fields])


def _parts(
    boxes: list[Box], start: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yields each box's part of a block of the local tensor, and its start in the block."""
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
