"""Boxes: the blocks of a tensor that a placement assigns to one rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Block: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"
"""First index along each dimension of a block of a global tensor, and the block's sizes."""

Run = tuple[int, int]
"""First index and the index after the last, along one dimension of a global tensor."""


class Box(NamedTuple):
    """A block of a global tensor.

    Attributes:
        start: First index along each dimension.
        shape: The sizes.
        at: Position of the block in this rank's local tensor.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    at: tuple[int, ...]


class Cut(NamedTuple):
    """One sharding placement.

    Attributes:
        dim: The sharded dimension of the tensor.
        pieces: Number of pieces.
        piece: Index of the selected piece.
        split_factor: Number of pieces that the dimension is already in, each of which is cut
            separately; 1 for an ordinary shard.
    """

    dim: int
    pieces: int
    piece: int
    split_factor: int


def boxes(shape: Sequence[int], cuts: Iterable[Cut]) -> list[Box]:
    """Returns the boxes of a tensor that remain after cuts, in their order; usually one, or none.

    Pieces are those of `torch.chunk`: all of the same size, the last ones shorter or empty.

    Example:
        >>> boxes((10, 4), [Cut(dim=0, pieces=4, piece=3, split_factor=1)])
        [Box(start=(9, 0), shape=(1, 4), at=(0, 0))]
    """
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for cut in cuts:
        runs[cut.dim] = _cut(runs[cut.dim], cut)
    found = [Box((), (), ())]
    for dim_runs in runs:
        found = [
            Box((*box.start, start), (*box.shape, stop - start), (*box.at, at))
            for box in found
            for (start, stop), at in _placed(dim_runs)
        ]
    return found


def _cut(runs: list[Run], cut: Cut) -> list[Run]:
    chosen: list[Run] = []
    for part in range(cut.split_factor):
        chosen += _chunk(_chunk(runs, cut.split_factor, part), cut.pieces, cut.piece)
    return _joined(chosen)


def _chunk(runs: list[Run], pieces: int, index: int) -> list[Run]:
    """Returns the indices of piece ``index`` of the runs."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // pieces)
    low, high = min(index * size, total), min((index + 1) * size, total)
    chosen = []
    at = 0
    for start, stop in runs:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            chosen.append((start + first, start + last))
        at += stop - start
    return chosen


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _placed(runs: list[Run]) -> list[tuple[Run, int]]:
    """Returns each run with its position in the local tensor."""
    placed = []
    at = 0
    for start, stop in runs:
        placed.append(((start, stop), at))
        at += stop - start
    return placed


def check_tiled(shape: tuple[int, ...], blocks: Iterable[Block], *, is_whole: bool) -> None:
    """Refuses blocks that do not cover each element of a tensor once; equal blocks count as one.

    ``is_whole`` also refuses uncovered elements.

    Example:
        >>> check_tiled((4,), [((0,), (2,)), ((1,), (3,))], is_whole=True)
        Traceback (most recent call last):
        ...
        ValueError: its blocks at [0] and [1] overlap
    """
    distinct = list(dict.fromkeys(blocks))
    for start, sizes in distinct:
        if not len(start) == len(sizes) == len(shape):
            raise ValueError(f"its block at {list(start)} has another number of dimensions")
        within = zip(start, sizes, shape, strict=True)
        if not all(0 <= first <= first + size <= end for first, size, end in within):
            raise ValueError(f"its block at {list(start)} reaches beyond it")
    filled = [block for block in distinct if math.prod(block[1])]
    held = sum(math.prod(sizes) for _, sizes in filled)
    if is_whole and held < math.prod(shape):
        raise ValueError(f"only {held} of its {math.prod(shape)} elements were written")
    _check_disjoint(filled)


def _check_disjoint(blocks: list[Block]) -> None:
    """Compares each block with earlier blocks that extend to its start along one dimension."""
    dims = len(blocks[0][0]) if blocks else 0
    # Along the dimension with the most distinct starts, the fewest blocks reach each other.
    along = max(range(dims), key=lambda dim: len({start[dim] for start, _ in blocks}), default=0)
    reaching: list[Block] = []
    for start, sizes in sorted(blocks, key=lambda block: block[0][along] if dims else 0):
        if dims:
            reaching = [one for one in reaching if one[0][along] + one[1][along] > start[along]]
        for other, other_sizes in reaching:
            spans = zip(start, sizes, other, other_sizes, strict=True)
            if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans):
                raise ValueError(f"its blocks at {list(other)} and {list(start)} overlap")
        reaching.append((start, sizes))
