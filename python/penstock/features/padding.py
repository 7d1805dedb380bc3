"""Chooses the padded length of a row, so that reading it touches few blocks. Pure."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from penstock.features.table_metadata import BLOCK_BYTES

Align: TypeAlias = Literal["auto"] | bool

_GAIN_MIN = 0.1
"""Share of blocks read times bytes stored that padding must save; readers that do not know about
padding see additional columns."""


def row_bytes_for(value_bytes: int, item_bytes: int, align: Align) -> int:
    """Bytes that a row takes in its file.

    Args:
        value_bytes: Bytes of its elements.
        item_bytes: Bytes of one element.
        align: Whether rows are padded to straddle as few blocks as possible: always (True), never
            (False), or where it saves more than it costs (``"auto"``).

    Raises:
        ValueError: ``align`` is none of these.
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
    """Average number of blocks that hold part of a row, if rows are stored from a block on.

    Within blocks, rows begin at all multiples of the greatest common divisor of row and block.
    """
    return 1 + (row_bytes - math.gcd(row_bytes, BLOCK_BYTES)) / BLOCK_BYTES


def _cost(row_bytes: int) -> float:
    """Blocks read times bytes stored: a tenth more of either costs the same."""
    return blocks_per_row(row_bytes) * row_bytes


def _longer(value_bytes: int, item_bytes: int) -> list[int]:
    """Candidates for a padded length that may straddle fewer blocks."""
    if value_bytes <= BLOCK_BYTES:
        lengths = [1 << (value_bytes - 1).bit_length()]
    else:
        steps = (BLOCK_BYTES >> shift for shift in range(4))
        lengths = [-(-value_bytes // step) * step for step in steps]
    return [length for length in lengths if length % item_bytes == 0 and length > value_bytes]
