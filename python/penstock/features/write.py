"""`write`: rows into a checkpoint, without the table in memory."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.calls.arguments import decode_path, encode_metadata, to_native
from penstock.calls.progress import Progress, shown
from penstock.errors import StorageError, UnsupportedStateError
from penstock.features.note import MEMBER, Note
from penstock.features.padding import Align, row_bytes_for
from penstock.features.row_chunks import RowChunks
from penstock.features.table_file import TableFile
from penstock.loading.foreign import check_no_store
from penstock.offload.optim.files import Room, StateFile
from penstock.offload.streaming.safetensors import DTYPES
from penstock.offload.tensor_io import TensorIO
from penstock.options import Options
from penstock.reports import Fallback
from penstock.state import dtypes
from penstock.state.file_tensor import FileTensor
from penstock.state.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.state.file_tensor import FileTarget
    from penstock.state.flatten import Flattened

_KEY_CHARS_MAX = 1024
_RANK = 0
_SHARD = 99
"""The number under which the file of the rows is written. In the checkpoint it has another name,
that of the first shard or the next ones."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KINDS = {name: kind for kind, name in DTYPES.items()}


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
        UnsupportedStateError: Elements of the type cannot be stored, or the metadata is no JSON.
        StorageError: The operating system failed an operation: disk full, read-only, …
        ValueError: The rows are not what was said, or an argument is out of range.
        TypeError: They are no arrays, or not all of one type.

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
    where = decode_path(path)
    chunks = RowChunks(rows, shape, dtype)
    form = _Form.of(key, chunks, align)
    note = Note.of(key, chunks.row_shape)
    if metadata is not None and MEMBER in metadata:
        raise ValueError(f"metadata: the member {MEMBER!r} is ours: give it another name")
    noted = encode_metadata({**(metadata or {}), MEMBER: {key: note.to_json()}})
    settings = options or Options()
    job_options = to_native(settings)
    check_no_store(where)
    attempt = _native.Attempt.begin(where, overwrite=bool(overwrite))
    place = os.path.join(where, _native.shard_file(_RANK, _SHARD, attempt.id))
    try:
        with _io(settings) as io:
            file = _filled(place, io, form, chunks, progress)
            tensor = form.tensor(file, io, chunks.rows)
            flat = flatten({key: tensor, note.checks: file.checks})
            vote = _job(where, flat, job_options).write(attempt, _RANK)["vote"]
        committed = attempt.commit(
            [(_RANK, *vote)], step=None, metadata=noted, overwrite=bool(overwrite)
        )
    except StorageError as error:
        if error.errno in _FULL and error.path == place:
            raise _full(where, error, chunks.count, form) from error
        raise
    finally:
        # What is committed has a second name of its own.
        with contextlib.suppress(OSError):
            os.unlink(place)
        attempt.abandon()
    left_behind = committed["left_behind"]
    leftovers = () if left_behind is None else (Fallback(left_behind, "leftover"),)
    return WriteReport(
        path=where,
        key=key,
        checkpoint_id=committed["checkpoint_id"],
        rows=chunks.rows,
        row_shape=chunks.row_shape,
        row_bytes=form.row_bytes,
        padding_bytes=form.row_bytes - chunks.value_bytes,
        bytes=chunks.rows * form.row_bytes,
        seconds=time.perf_counter() - began,
        direct_io=file.is_direct,
        fallbacks=file.fallbacks + leftovers,
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """What the tensor of a table is in its file.

    Attributes:
        key: Its name.
        dtype: A `torch.dtype`.
        kind: What the header calls that.
        row_bytes: What a row takes.
        row_shape: The sizes of a row, with its padding.
    """

    key: str
    dtype: Any
    kind: str
    row_bytes: int
    row_shape: tuple[int, ...]

    @classmethod
    def of(cls, key: str, chunks: RowChunks, align: Align) -> _Form:
        if not isinstance(key, str):
            raise TypeError(f"key={key!r}: must be text")
        if not 0 < len(key) <= _KEY_CHARS_MAX or key == "__metadata__" or not key.isprintable():
            raise ValueError(f"key={key!r:.80}: must be a name of 1 to {_KEY_CHARS_MAX} characters")
        if chunks.dtype not in _KINDS:
            raise UnsupportedStateError(
                f"a table of {chunks.dtype} cannot be stored: safetensors has no name for it",
                key=key,
            )
        row_bytes = row_bytes_for(chunks.value_bytes, chunks.item_bytes, align)
        is_padded = row_bytes != chunks.value_bytes
        row_shape = (row_bytes // chunks.item_bytes,) if is_padded else chunks.row_shape
        dtype = dtypes.torch_dtype(chunks.dtype)
        return cls(key, dtype, _KINDS[chunks.dtype], row_bytes, row_shape)

    def tensor(self, file: TableFile, io: TensorIO, rows: int) -> FileTensor:
        held = StateFile(Room(file.path, file.nbytes), file.chunks, io, _no_target)
        return FileTensor(held, file.begin, self.key, self.dtype, (rows, *self.row_shape))


def _no_target(tensor: FileTensor) -> FileTarget:
    raise AssertionError(f"nothing is loaded in the place of {tensor}")


def _io(options: Options) -> TensorIO:
    return TensorIO(
        engine=options.engine,
        direct=options.direct,
        queue_depth=options.queue_depth,
        workers=options.io_threads,
        block_bytes=options.extent_bytes,
    )


def _filled(
    place: str, io: TensorIO, form: _Form, chunks: RowChunks, progress: bool | Progress
) -> TableFile:
    """The file with all rows, which survives a power cut."""
    nbytes = None if chunks.count is None else chunks.count * form.row_bytes
    dims = 1 + len(form.row_shape)
    with (
        closing(TableFile(place, io, form.key, form.kind, dims, nbytes)) as file,
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


def _job(path: str, flat: Flattened, options: dict[str, Any]) -> _native.Job:
    return _native.Job(
        path,
        flat.tensors,
        flat.aliases,
        flat.tree,
        linked=flat.linked,
        options=options,
        arena=None,
        lazy=True,
        nice=None,
    )


def _full(path: str, error: StorageError, count: int | None, form: _Form) -> StorageError:
    needed = None if count is None else count * form.row_bytes
    takes = "" if needed is None else f", which takes {needed} bytes"
    return StorageError(
        f"{path}: no room for the table {form.key!r}{takes}: {os.strerror(error.errno or 0)}: free"
        " some, and write it again: nothing has been changed",
        path=path,
        errno=error.errno,
        needed_bytes=needed,
    )
