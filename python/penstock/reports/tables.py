"""Counters and results of a `Table`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """Counters of a `Table` since it was opened, and the size of its logs.

    Attributes:
        rows: Rows requested.
        hits: Rows of these found in the cache.
        shared: Rows of these that were already being read for another batch.
        read_rows: Rows read from storage.
        requests: Read requests.
        read_bytes: Bytes read from storage, with the gaps between rows.
        logged_rows: Updated rows in the logs.
        log_bytes: Bytes of the logs.
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
class CompactionReport:
    """The result of `Table.compact`.

    Attributes:
        rows: Rows moved from the logs into the table's files.
        pieces: Files rewritten.
        bytes: Bytes of these files.
    """

    rows: int
    pieces: int
    bytes: int
