"""`KeptTables`: the tables of a checkpoint of Penstock, which is held as long as they are read."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.loading.opened import CHUNK_BYTES, BoxRead, StoredTensor
from penstock.checkpoint.loading.placed import placed
from penstock.checkpoint.state import tree
from penstock.checkpoint.steps.newest import open_newest
from penstock.errors import CorruptCheckpointError, StorageError
from penstock.features.row_tensor import RowTensor
from penstock.features.table_metadata import Note, notes_of
from penstock.io.arguments import to_native
from penstock.io.extents import Run
from penstock.tensors import dtypes
from penstock.tensors.memory import of_array

if TYPE_CHECKING:
    from penstock.checkpoint.loading.opened import OpenCheckpoint
    from penstock.checkpoint.loading.placed import PlacedTensor

_PIECE_BYTES = 16 * CHUNK_BYTES
"""Bytes that are read and compared at a time."""


class KeptTables:
    """The tensors of a checkpoint; nobody removes its files before `release`.

    Args:
        path: The directory of a checkpoint, or of a store, whose newest complete step is taken.
        stacklevel: Whom warnings are of, counted from whoever calls this.

    Attributes:
        path: The directory of the checkpoint.
        tables: By name, without the checksums of others.
        notes: What is known of tables beside.

    Raises:
        CheckpointNotFoundError: There is none.
        IncompleteCheckpointError: The save there never finished.
        CorruptCheckpointError: It is damaged.
        PartialCheckpointError: It was salvaged, and something is missing.
    """

    def __init__(self, path: str, *, stacklevel: int) -> None:
        self._checkpoint: OpenCheckpoint = open_newest(path, stacklevel=stacklevel + 1)
        self.path = self._checkpoint.path
        try:
            self._checkpoint.look(0)
            with self._checkpoint.reading():
                tensors = {one.name: _table(one) for one in placed(self._checkpoint)}
                self.notes = notes_of(self._checkpoint.metadata(), self.path)
        except BaseException:
            # An exception keeps this frame, and must not keep the files from being deleted.
            self.release()
            raise
        self._checks = {note.checks for note in self.notes.values()}
        self.tables = {name: one for name, one in tensors.items() if name not in self._checks}
        self._tensors = tensors

    def release(self) -> None:
        """Lets the files be removed."""
        self._checkpoint.release()

    def parts(self) -> dict[str, RowTensor]:
        """Tensors that others are made of, such as the values of a sparse one, by name."""
        with self._checkpoint.reading():
            found = {one.name: _table(one) for one in placed(self._checkpoint, is_plain=True)}
        known = self.tables.keys() | self._checks
        return {name: one for name, one in found.items() if name not in known}

    def row_shape(self, key: str, table: RowTensor) -> tuple[int, ...]:
        """The sizes of a row of a table, without padding.

        Raises:
            CorruptCheckpointError: Its note says more than a row has.
        """
        note = self.notes.get(key)
        if note is None:
            return table.shape[1:]
        row_bytes = math.prod(note.row_shape) * table.item_bytes
        if row_bytes > table.row_bytes:
            raise self._disagreeing(key, f"rows of {row_bytes} bytes, of {table.row_bytes}")
        return note.row_shape

    def checks(self, key: str, blocks: int) -> np.ndarray[Any, Any] | None:
        """The checksum of each block of a table, compared with its own digest.

        Args:
            key: Of the table.
            blocks: How many it has.

        Raises:
            CorruptCheckpointError: They are damaged, or of another table.
        """
        note = self.notes.get(key)
        if note is None or note.checks is None:
            return None
        found = self._tensors.get(note.checks)
        if found is None or (found.dtype, found.shape) != ("uint32", (blocks,)):
            raise self._disagreeing(key, f"checksums of {blocks} blocks in {note.checks!r}")
        sums = np.empty(blocks, np.uint32)
        with self._checkpoint.reading():
            wanted = BoxRead(self._leaf(note), (0,), of_array(sums, note.checks))
            self._checkpoint.read([wanted], to_native(None))
        return sums

    def check_digests(self, path: str, offset: int, nbytes: int) -> None:
        """Reads a part of a file, and compares it with the digests of its chunks.

        Args:
            path: The file.
            offset: Where the part begins, in bytes.
            nbytes: Its length.

        Raises:
            CorruptCheckpointError: It is not what was saved.
            StorageError: It cannot be read.
        """
        end = offset + nbytes
        memory = bytearray(_PIECE_BYTES)
        try:
            with open(path, "rb") as file:
                for at in range(offset // CHUNK_BYTES * CHUNK_BYTES, end, _PIECE_BYTES):
                    file.seek(at)
                    # Whole chunks: a digest is of nothing less.
                    last = min(at + _PIECE_BYTES, -(-end // CHUNK_BYTES) * CHUNK_BYTES)
                    count = file.readinto(memoryview(memory)[: last - at])
                    piece = of_array(np.frombuffer(memory, np.uint8, count), path)
                    self._checkpoint.check(os.path.basename(path), at, [piece], (offset, end))
        except OSError as error:
            raise StorageError(
                f"cannot read {path}: {error.strerror}", path=path, errno=error.errno
            ) from error

    def _leaf(self, note: Note) -> StoredTensor:
        leaves: dict[str, Any] = dict(tree.leaves(self._checkpoint.root))
        return self._checkpoint.tensor(leaves[note.checks or ""])

    def _disagreeing(self, key: str, lacks: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.path}: the metadata says that {key!r} has {lacks}, which is not so: write the"
            " table again with penstock.features.write",
            path=self.path,
            tensor=key,
        )


def _table(one: PlacedTensor) -> RowTensor:
    runs = one.runs
    item_bytes = dtypes.ITEM_BYTES.get(one.dtype)
    if item_bytes is None:
        # A type of NumPy, perhaps of a package that is not here; arrays are stored whole.
        item_bytes = sum(run.nbytes for run in runs or ()) // max(1, math.prod(one.shape))
    places = None if runs is None else tuple(Run(run.file, run.begin, run.nbytes) for run in runs)
    return RowTensor(one.dtype, item_bytes, one.shape, places)
