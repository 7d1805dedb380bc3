"""Who of several ranks that hold the same boxes writes which."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

from penstock.checkpoint.layout.boxes import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.ranks.members import Members

PIECE_BYTES_MIN = 4 << 20
"""Replicas cut a box no finer than this: smaller pieces cost more requests than they level out."""

_PIECES_PER_SHARE = 8
"""Pieces are at most so small a part of what each replica writes: they fill up to within that."""


class Piece(NamedTuple):
    """A box of a tensor, or a part of it, that somebody has to write.

    Attributes:
        tensor: Which of the tensors.
        box: What of it.
    """

    tensor: int
    box: Box


class HeldBox(NamedTuple):
    """A box that is on several ranks.

    Attributes:
        tensor: Which of the tensors.
        name: Its name, the same on all ranks.
        box: What of it.
        item_bytes: Bytes of an element.
        is_cut: Whether several may write a part each.
    """

    tensor: int
    name: str
    box: Box
    item_bytes: int
    is_cut: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return _nbytes(self.box.shape, self.item_bytes)


def share_out(held: Sequence[HeldBox], replicas: Members, rank: int) -> list[Piece]:
    """What one of several ranks, all of which hold the same boxes, writes of them.

    Boxes that are large beside a fair share are cut along a dimension, where they may be. Then the
    largest piece goes to the rank that has least, and so on ("longest processing time first",
    Graham 1969), which leaves the fullest rank within a piece of the emptiest.

    Args:
        held: All boxes that these ranks have in common, in any order.
        replicas: The ranks.
        rank: The one that asks.
    """
    if len(replicas.ranks) == 1:
        return [Piece(item.tensor, item.box) for item in held]
    share_bytes = sum(item.nbytes for item in held) // len(replicas.ranks)
    piece_bytes_max = max(share_bytes // _PIECES_PER_SHARE, PIECE_BYTES_MIN)
    pieces = [
        (-_nbytes(box.shape, item.item_bytes), item.name, box, item.tensor)
        for item in held
        for box in (_split(item.box, item.nbytes, piece_bytes_max) if item.is_cut else (item.box,))
    ]
    pieces.sort()
    # Equal loads go by number: a heap of pairs needs no more.
    loads = [(0, number) for number in replicas.ranks]
    mine = []
    for minus_bytes, _, box, tensor in pieces:
        load_bytes, number = loads[0]
        heapq.heapreplace(loads, (load_bytes - minus_bytes, number))
        if number == rank:
            mine.append(Piece(tensor, box))
    return mine


def _split(box: Box, nbytes: int, piece_bytes_max: int) -> list[Box]:
    """A box in about equal pieces along its first dimension that has enough to give."""
    pieces = -(-nbytes // piece_bytes_max)
    if pieces == 1:
        return [box]
    dim = next((dim for dim, size in enumerate(box.shape) if size >= pieces), None)
    if dim is None:
        dim = max(range(len(box.shape)), key=box.shape.__getitem__)
        pieces = box.shape[dim]
    size = box.shape[dim]
    cut = []
    for piece in range(pieces):
        low, high = size * piece // pieces, size * (piece + 1) // pieces
        cut.append(
            Box(
                _with(box.start, dim, box.start[dim] + low),
                _with(box.shape, dim, high - low),
                _with(box.at, dim, box.at[dim] + low),
            )
        )
    return cut


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _nbytes(shape: tuple[int, ...], item_bytes: int) -> int:
    return math.prod(shape) * item_bytes
