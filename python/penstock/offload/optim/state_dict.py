"""`BoxBatch`: boxes of many tensors that are in memory together, on their way into files.

They are read together in the order of the request, and written in the order of the files: bytes
adjacent in a file are adjacent in memory, and written at once. This module does no I/O.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.offload.optim.layout import LINE_BYTES
from penstock.tensors.file_tensor import FileBox

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.offload.optim.layout import ParameterEntry, StateSegment

PIECE_BYTES = 16 << 20
_BOX_BYTES = 1 << 10
"""Memory of a box beside its elements: its objects, and alignment as in the file."""


class CopyRange(NamedTuple):
    """Bytes adjacent both in a file and in memory.

    Attributes:
        segment: Segment of the file.
        file: Index of the file in the segment.
        offset: Offset in the file.
        place: Offset in the memory of the piece.
        nbytes: Length in bytes.
    """

    segment: StateSegment
    file: int
    offset: int
    place: int
    nbytes: int


class BoxBatch(NamedTuple):
    """Boxes, and their places in files.

    Attributes:
        boxes: Boxes of tensors, by index in the request.
        runs: The same bytes by file.
        nbytes: Memory of the piece.
    """

    boxes: list[FileBox]
    runs: list[CopyRange]
    nbytes: int


class _LocatedBox(NamedTuple):
    """A box and its place in a file; the first three fields sort the boxes of a piece.

    Attributes:
        rank: Position of the segment among all.
        file: Index of the file in the segment.
        offset: Offset in the file.
        nbytes: Length in bytes.
        segment: The segment.
        target: Index of its tensor in the request.
        start: Index of its first element.
        shape: Its shape.
    """

    rank: int
    file: int
    offset: int
    nbytes: int
    segment: StateSegment
    target: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


def pieces(
    wanted: Sequence[tuple[StateSegment, int, int]], order: Iterable[int] | None = None
) -> Iterator[BoxBatch]:
    """Cuts tensors into boxes, and packs them into pieces in the order of the files.

    Args:
        wanted: The segment, parameter number and file index of each tensor.
        order: The indices of the tensors, in the order of the pieces; as they come by default.

    Yields:
        Pieces of at most `PIECE_BYTES`.
    """
    gathered: list[_LocatedBox] = []
    taken = 0
    ranks: dict[StateSegment, int] = {}
    for target in range(len(wanted)) if order is None else order:
        segment, number, file = wanted[target]
        rank = ranks.setdefault(segment, len(ranks))
        index = segment.index_of(number)
        entry, begin = segment.entries[index], segment.starts[index]
        item_bytes = int(entry.dtype.itemsize)
        for start, shape, first in _boxes(entry, item_bytes):
            nbytes = math.prod(shape) * item_bytes
            if gathered and taken + nbytes + _BOX_BYTES > PIECE_BYTES:
                yield _piece(gathered)
                gathered, taken = [], 0
            offset = begin + first * item_bytes
            gathered.append(
                _LocatedBox(rank, file, offset, nbytes, segment, target, start, shape),
            )
            taken += nbytes + _BOX_BYTES
    if gathered:
        yield _piece(gathered)


def _piece(gathered: list[_LocatedBox]) -> BoxBatch:
    gathered.sort(key=itemgetter(0, 1, 2))
    boxes: list[FileBox] = []
    runs: list[CopyRange] = []
    end = 0
    for found in gathered:
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.segment, last.file) == (found.segment, found.file)
            and last.offset + last.nbytes == found.offset
        ):
            runs[-1] = last._replace(nbytes=last.nbytes + found.nbytes)
        else:
            # Keeps the alignment in the file, so that elements of any type are aligned.
            end = -(-end // LINE_BYTES) * LINE_BYTES + found.offset % LINE_BYTES
            runs.append(CopyRange(found.segment, found.file, found.offset, end, found.nbytes))
        boxes.append(FileBox(found.target, found.start, found.shape, end))
        end += found.nbytes
    return BoxBatch(boxes, runs, end)


def _boxes(
    entry: ParameterEntry, item_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cuts a tensor into contiguous boxes: start, shape and first element of each."""
    if entry.count:
        yield from _boxes_of(entry.shape, max(PIECE_BYTES // item_bytes, 1), (), 0)


def _boxes_of(
    shape: tuple[int, ...], most: int, outer: tuple[int, ...], first: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    ones = (1,) * len(outer)
    if math.prod(shape) <= most:
        yield (*outer, *(0,) * len(shape)), (*ones, *shape), first
        return
    inner = math.prod(shape[1:])
    if inner > most:
        for index in range(shape[0]):
            yield from _boxes_of(shape[1:], most, (*outer, index), first + index * inner)
        return
    rows = most // inner
    for begin in range(0, shape[0], rows):
        count = min(rows, shape[0] - begin)
        start = (*outer, begin, *(0,) * (len(shape) - 1))
        yield start, (*ones, count, *shape[1:]), first + begin * inner
