"""How many bytes a row takes in a file, so that few blocks of the device are read for it. Pure."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from penstock.features.table_metadata import BLOCK_BYTES

Align: TypeAlias = Literal["auto"] | bool

_GAIN_MIN = 0.1
"""What has to be saved, of the bytes that are read and those that are kept, for a row to be padded:
readers that know nothing of it see more columns."""


def row_bytes_for(value_bytes: int, item_bytes: int, align: Align) -> int:
    """Bytes that a row takes.

    Args:
        value_bytes: Of its elements.
        item_bytes: Of one of them.
        align: Whether rows straddle as few blocks as they can, whatever that takes (True), or where
            it saves more than it takes (``"auto"``), or are as long as they are (False).

    Raises:
        ValueError: It is none of these.
    """
    if align not in ("auto", True, False):
        raise ValueError(f"align={align!r}: must be 'auto', True or False")
    if align is False:
        return value_bytes
    lengths = [value_bytes, *_longer(value_bytes, item_bytes)]
    if align is True:
        return min(lengths, key=lambda length: (blocks_per_row(length), length))
    best = min(lengths, key=lambda length: (_cost(length), length))
    return best if _cost(best) <= (1 - _GAIN_MIN) * _cost(value_bytes) else value_bytes


def blocks_per_row(row_bytes: int) -> float:
    """Blocks that have some of a row, on average, of rows that begin with a block and have no gaps.

    Rows begin at all multiples, within a block, of what the length has in common with it.
    """
    return 1 + (row_bytes - math.gcd(row_bytes, BLOCK_BYTES)) / BLOCK_BYTES


def _cost(row_bytes: int) -> float:
    """Blocks that are read times bytes that are kept: a tenth more of either weighs the same."""
    return blocks_per_row(row_bytes) * row_bytes


def _longer(value_bytes: int, item_bytes: int) -> list[int]:
    """Longer rows that may straddle fewer blocks."""
    if value_bytes <= BLOCK_BYTES:
        lengths = [1 << (value_bytes - 1).bit_length()]
    else:
        steps = (BLOCK_BYTES >> shift for shift in range(4))
        lengths = [-(-value_bytes // step) * step for step in steps]
    return [length for length in lengths if length % item_bytes == 0 and length > value_bytes]
