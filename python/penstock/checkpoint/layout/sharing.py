"""Divides boxes among the ranks that hold them, for writing."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

from penstock.checkpoint.layout.boxes import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.ranks.members import Members

PIECE_BYTES_MIN = 4 << 20
"""Smallest piece of a replicated box: smaller pieces cost more requests than they balance."""

_PIECES_PER_SHARE = 8
"""Largest piece, as a fraction 1/n of a replica's share: loads are equal up to one piece."""


class WriteShare(NamedTuple):
    """A box of a tensor, or a part of it, that one rank writes.

    Attributes:
        tensor: Index of the tensor.
        box: The box.
    """

    tensor: int
    box: Box


class HeldBox(NamedTuple):
    """A box that several ranks hold.

    Attributes:
        tensor: Index of the tensor.
        name: Its name, the same on all ranks.
        box: The box.
        item_bytes: Bytes of an element.
        is_cut: Whether several ranks may each write a part.
    """

    tensor: int
    name: str
    box: Box
    item_bytes: int
    is_cut: bool = True

    @property
    def nbytes(self) -> int:
        """Size of the box, in bytes."""
        return _nbytes(self.box.shape, self.item_bytes)


def share_out(held: Sequence[HeldBox], replicas: Members, rank: int) -> list[WriteShare]:
    """Returns the pieces that one rank writes, of boxes that several ranks hold.

    Boxes that are large compared to a fair share are cut along a dimension, if allowed. Then the
    largest piece goes to the rank with the smallest load, and so on ("longest processing time
    first", Graham 1969), which leaves the fullest rank within a piece of the emptiest.

    Args:
        held: All boxes that these ranks have in common, in any order.
        replicas: The ranks.
        rank: The calling rank.
    """
    if len(replicas.ranks) == 1:
        return [WriteShare(item.tensor, item.box) for item in held]
    share_bytes = sum(item.nbytes for item in held) // len(replicas.ranks)
    piece_bytes_max = max(share_bytes // _PIECES_PER_SHARE, PIECE_BYTES_MIN)
    pieces = [
        (-_nbytes(box.shape, item.item_bytes), item.name, box, item.tensor)
        for item in held
        for box in (_split(item.box, item.nbytes, piece_bytes_max) if item.is_cut else (item.box,))
    ]
    pieces.sort()
    # Ranks of equal load are ordered by number, so a heap of pairs suffices.
    loads = [(0, number) for number in replicas.ranks]
    mine = []
    for minus_bytes, _, box, tensor in pieces:
        load_bytes, number = loads[0]
        heapq.heapreplace(loads, (load_bytes - minus_bytes, number))
        if number == rank:
            mine.append(WriteShare(tensor, box))
    return mine


def _split(box: Box, nbytes: int, piece_bytes_max: int) -> list[Box]:
    """Cuts a box into about equal pieces along its first dimension that is large enough."""
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
