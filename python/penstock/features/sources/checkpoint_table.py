"""`CheckpointTables`: the tables of a Penstock checkpoint, held open while they are read."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.loading.opened import CHUNK_BYTES, BoxRead, StoredTensor
from penstock.checkpoint.loading.placed import placed
from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.steps.newest import open_newest
from penstock.errors import CorruptCheckpointError, UnsupportedStateError, storage_errors
from penstock.features.sources.row_tensor import RowTensor
from penstock.features.sources.table_metadata import TAG_BYTES, table_metadata_of
from penstock.io.arrays import to_write_from
from penstock.io.files.extents import FileRange
from penstock.sealing.unsealing import CLEAR, Unsealing
from penstock.tensors import dtypes
from penstock.tensors.arguments import to_native
from penstock.tensors.memory import of_array

if TYPE_CHECKING:
    from penstock import _native
    from penstock.checkpoint.loading.opened import OpenCheckpoint
    from penstock.checkpoint.loading.placed import PlacedTensor

_PIECE_BYTES = 16 * CHUNK_BYTES
"""Bytes read and compared at a time."""


class CheckpointTables:
    """The tensors of a checkpoint, whose files nobody removes before `release`.

    Args:
        path: The directory of a checkpoint, or of a store, whose newest complete step is used.
        stacklevel: Stack level for warnings, counted from the caller.
        unsealing: How a sealed checkpoint is opened.

    Attributes:
        path: The directory of the checkpoint.
        is_sealed: Whether it is sealed.
        is_signed: Whether it was opened with keys of which one must have signed it.
        tables: Tensors by name, without those that hold checksums or tags of other tables.
        table_metadata: Metadata of tables written by Penstock, by name.
    """

    def __init__(self, path: str, *, stacklevel: int, unsealing: Unsealing = CLEAR) -> None:
        self._checkpoint: OpenCheckpoint = open_newest(
            path, stacklevel=stacklevel + 1, unsealing=unsealing
        )
        self.is_sealed = self._checkpoint.is_sealed
        self.is_signed = unsealing.signers is not None
        self.path = self._checkpoint.path
        try:
            self._checkpoint.view_as(0)
            with self._checkpoint.reading():
                tensors = {one.name: _table(one) for one in placed(self._checkpoint)}
                self.table_metadata = table_metadata_of(self._checkpoint.metadata(), self.path)
        except BaseException:
            # A stored exception keeps this frame alive, which must not keep the files from removal.
            self.release()
            raise
        notes = self.table_metadata.values()
        self._checks = {name for note in notes for name in (note.checks, note.tags)}
        self.tables = {name: one for name, one in tensors.items() if name not in self._checks}
        self._tensors = tensors

    def release(self) -> None:
        """Lets the files be removed."""
        self._checkpoint.release()

    def parts(self) -> dict[str, RowTensor]:
        """Tensors that are parts of other values, such as those of a sparse tensor, by name."""
        with self._checkpoint.reading():
            found = {one.name: _table(one) for one in placed(self._checkpoint, is_plain=True)}
        known = self.tables.keys() | self._checks
        return {name: one for name, one in found.items() if name not in known}

    def row_shape(self, key: str, table: RowTensor) -> tuple[int, ...]:
        """The shape of a row of a table, without padding."""
        table_note = self.table_metadata.get(key)
        if table_note is None:
            return table.shape[1:]
        row_bytes = math.prod(table_note.row_shape) * table.item_bytes
        if row_bytes > table.row_bytes:
            raise self._disagreeing(key, f"rows of {row_bytes} bytes, of {table.row_bytes}")
        return table_note.row_shape

    def checks(self, key: str, blocks: int) -> np.ndarray[Any, Any] | None:
        """The checksum of each block of a table, verified against its own digest.

        Returns:
            The checksums; None if the table was written without them.
        """
        table_note = self.table_metadata.get(key)
        if table_note is None or table_note.checks is None:
            return None
        found = self._tensors.get(table_note.checks)
        if found is None or (found.dtype, found.shape) != ("uint32", (blocks,)):
            raise self._disagreeing(key, f"checksums of {blocks} blocks in {table_note.checks!r}")
        sums = np.empty(blocks, np.uint32)
        with self._checkpoint.reading():
            wanted = BoxRead(self._leaf(table_note.checks), (0,), of_array(sums, "the checksums"))
            self._checkpoint.read([wanted], to_native(None))
        return sums

    def opener(self, key: str, path: str, blocks: int) -> _native.BlockOpener:
        """Opens the blocks of a sealed table, in one file.

        Raises:
            UnsupportedStateError: The tensor is none that `penstock.features.write` has sealed.
        """
        table_note = self.table_metadata.get(key)
        if table_note is None or table_note.tags is None:
            raise UnsupportedStateError(
                f"{self.path} is sealed by chunks of {CHUNK_BYTES} bytes, too many to read for a"
                f" row of {key!r}: load it, and write it with penstock.features.write(sealing=)",
                key=key,
            )
        found = self._tensors.get(table_note.tags)
        if found is None or (found.dtype, found.shape) != ("uint8", (blocks, TAG_BYTES)):
            raise self._disagreeing(key, f"tags of {blocks} blocks in {table_note.tags!r}")
        tags = np.empty((blocks, TAG_BYTES), np.uint8)
        with self._checkpoint.reading():
            wanted = BoxRead(self._leaf(table_note.tags), (0, 0), of_array(tags, "the tags"))
            self._checkpoint.read([wanted], to_native(None))
        native = self._checkpoint.native
        return native.open_blocks(os.path.basename(path), to_write_from(tags))

    def check_digests(self, path: str, offset: int, nbytes: int) -> None:
        """Reads a byte range of a file and compares it with the digests of its chunks."""
        end = offset + nbytes
        memory = bytearray(_PIECE_BYTES)
        with storage_errors("read", path), open(path, "rb") as file:
            for at in range(offset // CHUNK_BYTES * CHUNK_BYTES, end, _PIECE_BYTES):
                file.seek(at)
                # Reads whole chunks, as a digest covers a whole chunk.
                last = min(at + _PIECE_BYTES, -(-end // CHUNK_BYTES) * CHUNK_BYTES)
                count = file.readinto(memoryview(memory)[: last - at])
                piece = of_array(np.frombuffer(memory, np.uint8, count), path)
                self._checkpoint.check(os.path.basename(path), at, [piece], (offset, end))

    def _leaf(self, name: str) -> StoredTensor:
        leaves: dict[str, Any] = dict(tree.leaves(self._checkpoint.root))
        return self._checkpoint.tensor(leaves[name])

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
        # A NumPy type, perhaps of a package not installed here; arrays are stored whole.
        item_bytes = sum(run.nbytes for run in runs or ()) // max(1, math.prod(one.shape))
    places = (
        None if runs is None else tuple(FileRange(run.file, run.begin, run.nbytes) for run in runs)
    )
    return RowTensor(one.dtype, item_bytes, one.shape, places)
