"""`Source`: where the rows of a table lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.offload.streaming.stored import FileMark


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows that lie together in one file.

    Attributes:
        path: The file.
        offset: Where in it the first of them begins, in bytes.
        first_row: Which row of the table that is.
        rows: How many there are.
        mark: What the file was when they were found.
    """

    path: str
    offset: int
    first_row: int
    rows: int
    mark: FileMark


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the rows of a table lie.

    Attributes:
        path: As the caller named it.
        key: Which tensor there; empty where there are no names.
        dtype: The name of its type.
        row_shape: Its sizes behind the first.
        row_bytes: What a row takes in its file.
        rows: How many there are.
        segments: In the order of rows.
        checks: ``uint32``: CRC-32C of each 4,096 bytes of each segment in turn, of which the last
            may be fewer; None where nobody stored them.
        padding_bytes: Of a row, at its end, what is no value.
    """

    path: str
    key: str
    dtype: str
    row_shape: tuple[int, ...]
    row_bytes: int
    rows: int
    segments: tuple[Segment, ...]
    checks: Any = None
    padding_bytes: int = 0
