"""LMDB: a B+ tree in a file that is mapped."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock_bench.peers.gather.base import Plain
from penstock_bench.workloads import row_content

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock_bench.peers.gather.base import Setting

_TIMES_BYTES = 4
"""The largest map, relative to the rows: a tree whose rows are of a page wastes up to half."""


class Lmdb(Plain):
    """Rows by the number of each, big-endian; no read-ahead, which is what its makers advise."""

    def prepare(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Writes the tree, in the order of its keys."""
        import lmdb

        map_bytes = _TIMES_BYTES * setting.rows * (setting.row_bytes + 64) + (64 << 20)
        database = lmdb.open(setting.place, map_size=map_bytes, sync=False, writemap=True)
        with database, database.begin(write=True) as transaction:
            transaction.cursor().putmulti(_pairs(setting), append=True)

    def open(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Opens it to be read."""
        import lmdb

        database = lmdb.open(setting.place, readonly=True, lock=False, readahead=False)
        self._cursor = database.begin(buffers=True).cursor()
        self._words = setting.words

    def one(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows of a batch, by one call."""
        found = self._cursor.getmulti(keys(ids))
        return np.frombuffer(b"".join([row for _, row in found]), np.int64).reshape(-1, self._words)


def keys(ids: np.ndarray[Any, Any]) -> list[bytes]:
    """The key of each id: eight bytes whose order is that of the numbers."""
    return list(map(struct.Struct(">Q").pack, ids.tolist()))


def _pairs(setting: Setting) -> Iterator[tuple[bytes, bytes]]:
    first = 0
    for rows in row_content.chunks(setting.rows, setting.row_bytes):
        whole = rows.tobytes()
        for at, key in enumerate(keys(np.arange(first, first + len(rows)))):
            yield key, whole[at * setting.row_bytes : (at + 1) * setting.row_bytes]
        first += len(rows)
