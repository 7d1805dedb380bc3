"""What tables that change tell of what was done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """What was done with a table since it was opened, and what its logs have.

    Attributes:
        rows: That were asked for.
        hits: Of them, those that were in memory.
        shared: Of them, those that were on their way for another batch.
        read_rows: That were read.
        requests: That read them.
        read_bytes: That those have read, with what lies between rows.
        logged_rows: Rows that were written anew and are in logs.
        log_bytes: Of these logs.
    """

    rows: int
    hits: int
    shared: int
    read_rows: int
    requests: int
    read_bytes: int
    logged_rows: int
    log_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldReport:
    """What a fold did.

    Attributes:
        rows: That were put back.
        pieces: Files that were written for it.
        bytes: Of these.
    """

    rows: int
    pieces: int
    bytes: int
