"""`Piece`: boxes of many tensors that are in memory together, on their way into files.

They are read at once, in the order in which they are asked for, and written in that of the files:
what lies together there lies together in memory, and is one write. Nothing here reads or writes.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.offload.optim.layout import LINE_BYTES
from penstock.tensors.file_tensor import FileBox

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.offload.optim.layout import Entry, Segment

PIECE_BYTES = 16 << 20
_BOX_BYTES = 1 << 10
"""What a box takes beside its elements: what asks for it, and a place as in the file."""


class Run(NamedTuple):
    """What lies together, in a file and in memory.

    Attributes:
        segment: Whose file.
        file: Which of its files.
        offset: Where it begins there.
        place: Where it begins in the memory of the piece.
        nbytes: Its length.
    """

    segment: Segment
    file: int
    offset: int
    place: int
    nbytes: int


class Piece(NamedTuple):
    """Boxes, and where they go.

    Attributes:
        boxes: Of tensors, by their index among those that are asked for.
        runs: The same bytes.
        nbytes: Of memory that it takes.
    """

    boxes: list[FileBox]
    runs: list[Run]
    nbytes: int


class _Found(NamedTuple):
    """A box and its place in a file; the first three put those of a piece in order.

    Attributes:
        rank: Of the segment, among all.
        file: Which of its files.
        offset: Where in that.
        nbytes: Its length.
        segment: The segment.
        target: Index of its tensor.
        start: Index of its first element.
        shape: Its sizes.
    """

    rank: int
    file: int
    offset: int
    nbytes: int
    segment: Segment
    target: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


def pieces(wanted: Iterable[tuple[Segment, int, int]]) -> Iterator[Piece]:
    """Cuts tensors into boxes, and puts neighbours together.

    Args:
        wanted: Of each tensor its segment, number and file.

    Yields:
        Pieces of at most `PIECE_BYTES`.
    """
    gathered: list[_Found] = []
    taken = 0
    ranks: dict[Segment, int] = {}
    for target, (segment, number, file) in enumerate(wanted):
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
                _Found(rank, file, offset, nbytes, segment, target, start, shape),
            )
            taken += nbytes + _BOX_BYTES
    if gathered:
        yield _piece(gathered)


def _piece(gathered: list[_Found]) -> Piece:
    gathered.sort(key=itemgetter(0, 1, 2))
    boxes: list[FileBox] = []
    runs: list[Run] = []
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
            # Elements of any type may lie there, as they may in the file.
            end = -(-end // LINE_BYTES) * LINE_BYTES + found.offset % LINE_BYTES
            runs.append(Run(found.segment, found.file, found.offset, end, found.nbytes))
        boxes.append(FileBox(found.target, found.start, found.shape, end))
        end += found.nbytes
    return Piece(boxes, runs, end)


def _boxes(entry: Entry, item_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """A tensor, in boxes that lie together: start, shape and first element of each."""
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
