"""`write`: writes rows into a checkpoint, without holding the table in memory."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.common.progress import Progress, shown
from penstock.features.sources.table_metadata import (
    TableMetadata,
    beside_name,
    with_table_metadata,
)
from penstock.features.writing.publish import publish
from penstock.features.writing.row_chunks import RowChunks
from penstock.features.writing.row_format import RowFormat
from penstock.options import Options
from penstock.sealing.sealing import Sealing, check_sealing
from penstock.tensors.arguments import decode_local_path

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from penstock.features.sources.table_metadata import Align
    from penstock.features.writing.table_file import TableFile
    from penstock.io.tensor_io import TensorIO
    from penstock.reports import Fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """The result of `write`.

    Attributes:
        path: The checkpoint's directory.
        key: The table's name in it.
        checkpoint_id: Unique identity of the checkpoint.
        rows: The number of rows.
        row_shape: The shape of a row.
        row_bytes: Bytes of a row in the file.
        padding_bytes: How many of these, at the end, are padding.
        bytes: Bytes of all rows in the file.
        seconds: Wall time of the whole call.
        direct_io: Whether the page cache was bypassed.
        fallbacks: Faster ways that could not be used, each with its reason.
    """

    path: str
    key: str
    checkpoint_id: str
    rows: int
    row_shape: tuple[int, ...]
    row_bytes: int
    padding_bytes: int
    bytes: int
    seconds: float
    direct_io: bool
    fallbacks: tuple[Fallback, ...]


def write(
    path: str | os.PathLike[str] | bytes,
    rows: Any,
    *,
    key: str = "features",
    shape: Sequence[int | None] | None = None,
    dtype: Any = None,
    align: Align = "auto",
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    sealing: Sealing | None = None,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> WriteReport:
    """Writes a table into a checkpoint of its own; when this returns, it survives a power cut.

    Rows are written past the page cache at the speed of the device, through 64 MiB of memory, so a
    table may be larger than memory. Each 4,096 bytes get a checksum, with which a row is compared
    whenever it is read. The checkpoint appears once all rows are written; a checkpoint that it
    replaces stays until then. One process writes a table, however many ranks there are.

    Args:
        path: The checkpoint's directory; created if missing, with its parents.
        rows: An array or a tensor, whose first dimension counts rows; or an iterable of arrays or
            tensors of some rows each, which may be changed once the next one is requested.
        key: Name of the table.
        shape: The number of rows (None if unknown), followed by the shape of a row. Default: the
            shape of the first chunk. If the number is known, space is reserved before the first row
            is requested.
        dtype: The element type; default: that of the first chunk. Nothing is converted.
        align: Whether rows are padded, so that each touches fewer blocks of 4,096 bytes:
            ``"auto"`` where that saves at least a tenth of blocks read times bytes stored; True
            wherever it saves a block; False never. A load of the checkpoint as a state returns the
            padding as additional columns of zeros.
        metadata: Plain JSON to store with it, readable with `penstock.inspect`.
        overwrite: Replace a complete checkpoint at the path.
        sealing: For whom the table is sealed. Rows are encrypted in blocks of 4,096 bytes before
            they are written; their tags take the place of checksums. Open it with
            ``penstock.features.open(…, identities=…)``.
        options: Settings of the I/O; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and the
            bytes in all, as far as they are known.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False; or the
            directory is a store.
        UnsupportedStateError: Elements of the type cannot be stored, the metadata is no JSON, or
            the rows are a sparse, nested or quantized tensor, or one without data.
        StorageError: The operating system failed an operation: disk full, read-only, …
        ValueError: The rows contradict ``shape``, or an argument is out of range.
        TypeError: The rows are no arrays, or not all of one type; or an argument is of another
            type.
        KmsError: A key management service refused or was not reachable; nothing was written.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> from penstock.features import write
        >>> path = tempfile.mkdtemp() + "/table"
        >>> report = write(path, (np.full((10, 768), n, "float32") for n in range(3)))
        >>> report.rows, report.row_bytes, report.padding_bytes
        (30, 4096, 1024)
        >>> penstock.load(path)["features"].shape
        torch.Size([30, 1024])
    """
    began = time.perf_counter()
    check_sealing(sealing)
    is_sealed = sealing is not None
    where = decode_local_path(path)
    chunks = RowChunks(rows, shape, dtype)
    row_format = RowFormat.of(key, chunks.dtype, chunks.item_bytes, chunks.row_shape, align)
    table_note = TableMetadata.of(key, chunks.row_shape, is_sealed=is_sealed)
    full_metadata = with_table_metadata(metadata, {key: table_note.to_json()})
    files: list[TableFile] = []

    def fill(io: TensorIO, places: Mapping[str, str]) -> dict[str, Any]:
        file = _filled(places[key], io, row_format, chunks, progress, is_sealed=is_sealed)
        files.append(file)
        rows = row_format.tensor(file, io, chunks.rows)
        return {key: rows, beside_name(key, is_sealed=is_sealed): file.checks}

    checkpoint_id, leftovers = publish(
        where,
        [key],
        fill,
        metadata=full_metadata,
        overwrite=overwrite,
        options=Options() if options is None else options,
        needed_bytes=None if chunks.count is None else chunks.count * row_format.row_bytes,
        sealing=sealing,
    )
    (file,) = files
    return WriteReport(
        path=where,
        key=key,
        checkpoint_id=checkpoint_id,
        rows=chunks.rows,
        row_shape=chunks.row_shape,
        row_bytes=row_format.row_bytes,
        padding_bytes=row_format.row_bytes - chunks.value_bytes,
        bytes=chunks.rows * row_format.row_bytes,
        seconds=time.perf_counter() - began,
        direct_io=file.is_direct,
        fallbacks=file.fallbacks + leftovers,
    )


def _filled(
    place: str,
    io: TensorIO,
    row_format: RowFormat,
    chunks: RowChunks,
    progress: bool | Progress,
    *,
    is_sealed: bool,
) -> TableFile:
    """Writes a file with all rows, durably."""
    nbytes = None if chunks.count is None else chunks.count * row_format.row_bytes
    with (
        closing(row_format.file(place, io, chunks.count, is_sealed=is_sealed)) as file,
        shown(progress, "writing") as update,
    ):
        for part in chunks.parts(row_format.row_bytes):
            file.append(part)
            _report_progress(update, file, nbytes)
        file.finish((chunks.rows, *row_format.row_shape))
        _report_progress(update, file, nbytes)
    return file


def _report_progress(update: Progress | None, file: TableFile, nbytes: int | None) -> None:
    if update is not None:
        done = file.nbytes - file.begin
        update(done, done if nbytes is None else nbytes)
