"""The boxes of global tensors that a rank's `ShardedTensor` holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class Piece(NamedTuple):
    """A box of a global tensor, and its elements on this rank.

    Attributes:
        start: Index of the box's first element.
        elements: A view of the rank's memory, with as many dimensions as the global tensor.
    """

    start: tuple[int, ...]
    elements: torch.Tensor


def pieces_of(sharded: Any) -> list[Piece]:
    """Returns the boxes of a `ShardedTensor` that has data.

    There is one, except before Megatron-Core 0.16: there the distributed optimizer holds a range of
    a flattened box, which is a box for the rest of each row that it cuts, and one for whole rows.
    """
    data, ahead = sharded.data.detach(), sharded.prepend_axis_num
    offset = tuple(map(int, sharded.global_offset))
    held = getattr(sharded, "flattened_range", None)
    if held is None:
        return [Piece(offset, data[(None,) * ahead])]
    found: list[Piece] = []
    if held.start == held.stop:
        return found
    for start, sizes, at in _blocks(tuple(sharded.local_shape), held.start, held.stop):
        elements = data[at : at + math.prod(sizes)].view(sizes)
        inner = tuple(map(sum, zip(offset[ahead:], start, strict=True)))
        found.append(Piece((*offset[:ahead], *inner), elements[(None,) * ahead]))
    return found


def _blocks(
    shape: tuple[int, ...], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yields the boxes of a range of a flattened tensor: start, sizes, and place in the range.

    Example:
        >>> list(_blocks((3, 4), 2, 9))
        [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2), ((2, 0), (1, 1), 6)]
    """
    if len(shape) < 2:
        yield (first,) * len(shape), (end - first,) * len(shape), 0
        return
    row, at = math.prod(shape[1:]), first
    while at < end:
        index, within = divmod(at, row)
        if within == 0 and end - at >= row:
            count = (end - at) // row
            yield (index, *(0,) * (len(shape) - 1)), (count, *shape[1:]), at - first
            at += count * row
            continue
        stop = min(end - index * row, row)
        for start, sizes, place in _blocks(shape[1:], within, stop):
            yield (index, *start), (1, *sizes), at - first + place
        at = index * row + stop
