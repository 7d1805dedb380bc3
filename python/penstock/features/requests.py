"""What requests for rows have, at most, and what they rather read than leave out."""

from __future__ import annotations

from penstock.common.option_kinds import Number
from penstock.errors import UnsupportedStateError

GAP = Number(0, 1 << 30, "bytes", is_open=False)
GAP_BYTES = 16 << 10
"""What a fast drive reads in the time of a request: 2 GB/s by 120,000 of them a second."""
RUN_BYTES_MAX = 256 << 10
"""Requests of more are not faster, and keep what else is to be read waiting."""
_PAGE_BYTES = 4096


def check_length(name: str, row_bytes: int, block_bytes: int, remedy: str = "") -> None:
    """That a row, with the blocks that it begins and ends in, fits into a request.

    Args:
        name: Of the table.
        row_bytes: What a row takes.
        block_bytes: What a request moves.
        remedy: What else can be done than to have larger ones.

    Raises:
        UnsupportedStateError: It does not.
    """
    longest = block_bytes - 2 * _PAGE_BYTES
    if row_bytes > longest:
        raise UnsupportedStateError(
            f"{name}: rows of {row_bytes} bytes; one request moves {longest}: give"
            f" io=TensorIO(block_bytes=…) with more{remedy}",
            key=name,
        )
