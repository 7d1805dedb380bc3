"""`write`: rows into a checkpoint, without the table in memory."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.common.progress import Progress, shown
from penstock.features.publish import publish
from penstock.features.row_chunks import RowChunks
from penstock.features.row_format import Form
from penstock.features.table_metadata import Note, checks_name, with_notes
from penstock.io.arguments import decode_local_path
from penstock.options import Options

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from penstock.features.padding import Align
    from penstock.features.table_file import TableFile
    from penstock.io.tensor_io import TensorIO
    from penstock.reports import Fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What was written and how.

    Attributes:
        path: The checkpoint's directory.
        key: The table's name in it.
        checkpoint_id: Identity of this very checkpoint.
        rows: How many there are.
        row_shape: The sizes of one.
        row_bytes: What one takes in the file.
        padding_bytes: How many of these, the last ones, are no part of it.
        bytes: Of the rows in the file.
        seconds: Wall time of the whole call.
        direct_io: Whether the page cache was bypassed.
        fallbacks: What was tried first and why it was not used.
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
    options: Options | None = None,
    progress: bool | Progress = False,
) -> WriteReport:
    """Writes a table into a checkpoint of its own; when this returns, a power cut cannot take it.

    Rows go past the page cache at the speed of the device, through 64 MiB of memory, and so does a
    table that is larger than memory. On the way each 4,096 bytes get a checksum, which is compared
    whenever a row is read. Until all is there, there is no checkpoint; one that is replaced stays
    until then. One process writes a table, however many ranks there are.

    Args:
        path: The checkpoint's directory; made if missing, its parents too.
        rows: An array or a tensor, whose first dimension counts rows; or an iterable of such, each
            some of the rows. What it gives may be changed when the next one is asked for.
        key: What the table is called.
        shape: The number of rows, or None where that is not known, and the sizes of a row; without,
            as the first chunk has them. Where the number is known, space is reserved before the
            first row is asked for.
        dtype: The type of the elements; without, that of the first chunk. Nothing is converted.
        align: Whether rows are padded, so that fewer blocks of 4,096 bytes have some of each:
            ``"auto"`` where that saves at least a tenth of what reads take, in blocks, times what
            rows take, in bytes; True wherever it saves a block; False never. Whoever reads the
            checkpoint as a state finds the padding as further columns of zeros.
        metadata: A note of plain JSON, readable with `penstock.inspect`.
        overwrite: Replace a complete checkpoint at the path.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all, as far as that is known.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False; or the
            directory is a store.
        UnsupportedStateError: Elements of the type cannot be stored, the metadata is no JSON, or
            the rows are a sparse, nested or quantized tensor, or one without data.
        StorageError: The operating system failed an operation: disk full, read-only, …
        ValueError: The rows are not what was said, or an argument is out of range.
        TypeError: They are no arrays, or not all of one type; or an argument is of another type.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> from penstock.features.write import write
        >>> path = tempfile.mkdtemp() + "/table"
        >>> report = write(path, (np.full((10, 768), n, "float32") for n in range(3)))
        >>> report.rows, report.row_bytes, report.padding_bytes
        (30, 4096, 1024)
        >>> penstock.load(path)["features"].shape
        torch.Size([30, 1024])
    """
    began = time.perf_counter()
    where = decode_local_path(path)
    chunks = RowChunks(rows, shape, dtype)
    form = Form.of(key, chunks.dtype, chunks.item_bytes, chunks.row_shape, align)
    note = Note.of(key, chunks.row_shape)
    noted = with_notes(metadata, {key: note.to_json()})
    files: list[TableFile] = []

    def fill(io: TensorIO, places: Mapping[str, str]) -> dict[str, Any]:
        file = _filled(places[key], io, form, chunks, progress)
        files.append(file)
        return {key: form.tensor(file, io, chunks.rows), checks_name(key): file.checks}

    checkpoint_id, leftovers = publish(
        where,
        [key],
        fill,
        metadata=noted,
        overwrite=overwrite,
        options=Options() if options is None else options,
        needed_bytes=None if chunks.count is None else chunks.count * form.row_bytes,
    )
    (file,) = files
    return WriteReport(
        path=where,
        key=key,
        checkpoint_id=checkpoint_id,
        rows=chunks.rows,
        row_shape=chunks.row_shape,
        row_bytes=form.row_bytes,
        padding_bytes=form.row_bytes - chunks.value_bytes,
        bytes=chunks.rows * form.row_bytes,
        seconds=time.perf_counter() - began,
        direct_io=file.is_direct,
        fallbacks=file.fallbacks + leftovers,
    )


def _filled(
    place: str, io: TensorIO, form: Form, chunks: RowChunks, progress: bool | Progress
) -> TableFile:
    """The file with all rows, which survives a power cut."""
    nbytes = None if chunks.count is None else chunks.count * form.row_bytes
    with (
        closing(form.file(place, io, chunks.count)) as file,
        shown(progress, "writing") as update,
    ):
        for part in chunks.parts(form.row_bytes):
            file.append(part)
            _tell(update, file, nbytes)
        file.finish((chunks.rows, *form.row_shape))
        _tell(update, file, nbytes)
    return file


def _tell(update: Progress | None, file: TableFile, nbytes: int | None) -> None:
    if update is not None:
        done = file.nbytes - file.begin
        update(done, done if nbytes is None else nbytes)
