"""The layout of parameters' state in files, and its cuts into windows of memory.

Parameters are grouped into *segments*. A segment has one file for each moment, all with the same
layout, so that a *window*, a range of bytes, holds the same elements in each of them. Windows begin
at multiples of a digest's chunk. This module does no I/O.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.tensors.file_tensor import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PAGE_BYTES = 4096
LINE_BYTES = 64
"""Tensors are cut at multiples of so many bytes, counted from their first element.

The fused kernels of PyTorch compute in vectors, and the last elements of a tensor one at a time,
which rounds differently. Vectors and threads begin at multiples of a cache line.
"""
SEGMENT_BYTES = 1 << 30
_LENGTH_BYTES = 8
_METADATA = {"format": "pt", "penstock": "1"}
_DECOY = "penstock.sealed"
"""The only name in the header of a sealed file: `docs/format.md`, 9.6."""
_HEADER_TYPES = {
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float16": "F16",
}


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """A parameter, as its state needs it.

    Attributes:
        number: Its number in the optimizer's ``state_dict``.
        shape: Shape of this rank's part.
        dtype: A `torch.dtype`, that of its moments.
        moments: Names of its moments.
    """

    number: int
    shape: tuple[int, ...]
    dtype: Any
    moments: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of each moment."""
        return self.count * int(self.dtype.itemsize)


class WindowPart(NamedTuple):
    """The part of a parameter's state that is in a window.

    Attributes:
        entry: The parameter.
        begin: The first element.
        end: The element behind the last.
        place: Offset in the window, in bytes.
    """

    entry: ParameterEntry
    begin: int
    end: int
    place: int


class Window(NamedTuple):
    """A range of bytes that is in memory of all files of a segment together.

    Attributes:
        begin: The first byte, a multiple of `CHUNK_BYTES`.
        end: The byte behind the last: a multiple of `CHUNK_BYTES`, or the end of the file.
        pieces: The state in it; headers are not listed.
    """

    begin: int
    end: int
    pieces: list[WindowPart]


@dataclass(eq=False)
class StateSegment:
    """Parameters whose state is in the same files, one file for each moment.

    Attributes:
        moments: Names of the moments, in the order of the files.
        entries: The parameters, in the order within a file.
        is_sealed: Whether the files are sealed: their headers then name no parameter.
        starts: Where each begins in a file, in bytes.
        headers: The header of each file, all of one length.
        nbytes: Bytes of each file.
    """

    moments: tuple[str, ...]
    entries: list[ParameterEntry]
    is_sealed: bool = False
    starts: list[int] = field(init=False)
    headers: list[bytes] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.entries = sorted(self.entries, key=_rank_in_file)
        self._indices = {entry.number: index for index, entry in enumerate(self.entries)}
        header = self._decoy if self.is_sealed else self._header
        texts = [header(moment) for moment in self.moments]
        room = -(-(_LENGTH_BYTES + max(map(len, texts))) // PAGE_BYTES) * PAGE_BYTES
        length = room - _LENGTH_BYTES
        self.headers = [
            length.to_bytes(_LENGTH_BYTES, "little") + one.ljust(length) for one in texts
        ]
        self.starts = []
        at = room
        for entry in self.entries:
            self.starts.append(at)
            at += entry.nbytes
        self.nbytes = at
        self._windows: dict[int, list[Window]] = {}

    def _decoy(self, _moment: str) -> bytes:
        nbytes = sum(entry.nbytes for entry in self.entries)
        entry = {"dtype": "U8", "shape": (nbytes,), "data_offsets": (0, nbytes)}
        described = {"__metadata__": _METADATA, _DECOY: entry}
        return json.dumps(described, separators=(",", ":")).encode()

    def _header(self, moment: str) -> bytes:
        described: dict[str, Any] = {"__metadata__": _METADATA}
        at = 0
        for entry in self.entries:
            described[label(entry.number, moment)] = {
                "dtype": header_type(entry.dtype),
                "shape": entry.shape,
                "data_offsets": (at, at + entry.nbytes),
            }
            at += entry.nbytes
        return json.dumps(described, separators=(",", ":")).encode()

    def windows(self, nbytes: int) -> list[Window]:
        """Cuts the segment into windows.

        Args:
            nbytes: Most bytes of a window, a multiple of `CHUNK_BYTES`. A window is longer if it
                would cut a tensor elsewhere than at a multiple of `LINE_BYTES`.
        """
        # Cached, as each step asks for them.
        if (known := self._windows.get(nbytes)) is not None:
            return known
        found = []
        begin = 0
        while begin < self.nbytes:
            end = min(begin + nbytes, self.nbytes)
            while end < self.nbytes and end > begin and not self._may_be_cut(end):
                end -= CHUNK_BYTES
            if end == begin:
                end = min(begin + nbytes, self.nbytes)
                while end < self.nbytes and not self._may_be_cut(end):
                    end = min(end + CHUNK_BYTES, self.nbytes)
            found.append(Window(begin, end, list(self._pieces(begin, end))))
            begin = end
        self._windows[nbytes] = found
        return found

    def index_of(self, number: int) -> int:
        """The index of a parameter among the entries."""
        return self._indices[number]

    def name_at(self, file: int, at: int) -> str:
        """The label of the moment that is at a byte of one of the files."""
        return label(self.entries[self._entry_at(at)].number, self.moments[file])

    def _may_be_cut(self, at: int) -> bool:
        if at <= self.starts[0]:
            return True
        start = self.starts[self._entry_at(at)]
        return (at - start) % LINE_BYTES == 0

    def _entry_at(self, at: int) -> int:
        """The last entry that begins at or before a byte."""
        return max(bisect_right(self.starts, at) - 1, 0)

    def _pieces(self, begin: int, end: int) -> Iterable[WindowPart]:
        for index in range(self._entry_at(begin), len(self.entries)):
            entry, start = self.entries[index], self.starts[index]
            if start >= end:
                return
            first, last = max(start, begin), min(start + entry.nbytes, end)
            if first < last:
                size = entry.dtype.itemsize
                yield WindowPart(
                    entry, (first - start) // size, (last - start) // size, first - begin
                )


def label(number: int, moment: str) -> str:
    """Name of a parameter's moment in the header of its file."""
    return f"{number}.{moment}"


def header_type(dtype: Any) -> str:
    """Name of a type in the header of a safetensors file; `KeyError` if moments cannot have it."""
    return _HEADER_TYPES[str(dtype).removeprefix("torch.")]


def segments_of(
    entries: Sequence[ParameterEntry], *, is_sealed: bool = False
) -> list[StateSegment]:
    """The segments of parameters, in their order."""
    groups: dict[tuple[str, ...], list[list[ParameterEntry]]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    for entry in entries:
        lists = groups.setdefault(entry.moments, [[]])
        size = sizes.get(entry.moments, 0) + entry.nbytes
        if lists[-1] and size > SEGMENT_BYTES:
            lists.append([])
            size = entry.nbytes
        lists[-1].append(entry)
        sizes[entry.moments] = size
    return [
        StateSegment(moments, one, is_sealed) for moments, lists in groups.items() for one in lists
    ]


def _rank_in_file(entry: ParameterEntry) -> tuple[int, int, int]:
    """Sorts whole pages first, then whole cache lines, then others by falling size of an element.

    `docs/format.md`, 5.3, requires it. Of the others the largest comes first: it begins at a cache
    line and so may be cut.
    """
    if entry.nbytes % PAGE_BYTES == 0:
        return 0, 0, 0
    if entry.nbytes % LINE_BYTES == 0:
        return 1, 0, 0
    return 2, -int(entry.dtype.itemsize), -entry.nbytes
