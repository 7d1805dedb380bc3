"""Limits of requests that read rows."""

from __future__ import annotations

from penstock.common.option_kinds import Number
from penstock.errors import UnsupportedStateError

GAP = Number(0, 1 << 30, "bytes", is_open=False)
GAP_BYTES = 16 << 10
"""Bytes that a fast drive reads in the time of one request: 2 GB/s at 120,000 requests a second."""
RUN_BYTES_MAX = 256 << 10
"""Longer requests are not faster, and delay other reads."""
_PAGE_BYTES = 4096
_RANGES_BYTES_MIN = 3 * _PAGE_BYTES


def check_length(name: str, row_bytes: int, block_bytes: int, remedy: str = "") -> None:
    """Raises `UnsupportedStateError` unless a row and its partial blocks fit into one request.

    ``remedy`` is a remedy beside larger requests, for the error.
    """
    longest = block_bytes - 2 * _PAGE_BYTES
    if row_bytes > longest:
        raise UnsupportedStateError(
            f"{name}: rows of {row_bytes} bytes; one request moves {longest}: give"
            f" io=TensorIO(extent_bytes=…) with more{remedy}",
            key=name,
        )


def check_ranges(name: str, block_bytes: int) -> None:
    """Raises `UnsupportedStateError` unless a request has room beside two partial blocks."""
    if block_bytes < _RANGES_BYTES_MIN:
        raise UnsupportedStateError(
            f"{name}: one request moves {block_bytes} bytes, and rows of different lengths need"
            f" {_RANGES_BYTES_MIN}: give io=TensorIO(extent_bytes=…) with as many or more",
            key=name,
        )
