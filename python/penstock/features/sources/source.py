"""`find`: locates the rows of a table of any supported format."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import _native
from penstock.checkpoint.loading.path_kind import as_table
from penstock.checkpoint.state.tree.names import escaped
from penstock.checkpoint.steps.newest import is_penstock
from penstock.common.file_names import rank_of
from penstock.common.found import check_fetched
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)
from penstock.features.sources import other_formats
from penstock.features.sources.checkpoint_table import CheckpointTables
from penstock.features.sources.elements import name_of
from penstock.features.sources.row_tensor import sizes_of
from penstock.features.sources.table_metadata import BLOCK_BYTES
from penstock.io.files.extents import FileRange
from penstock.io.files.file_marks import FileMark
from penstock.sealing.unsealing import CLEAR
from penstock.tensors.arguments import decode_local_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from penstock.features.sources.row_tensor import RowTensor
    from penstock.sealing.unsealing import Unsealing

_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSegment:
    """Consecutive rows in one file.

    Attributes:
        path: The file.
        offset: Where the first of them begins in the file, in bytes.
        first_row: The number of that row in the table.
        rows: The number of rows.
        mark: Identity of the file when the table was found.
    """

    path: str
    offset: int
    first_row: int
    rows: int
    mark: FileMark


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files and layout of a table.

    Attributes:
        path: The file or directory in which the table was found.
        key: Its name there; empty for a file that is one table.
        dtype: Name of its element type, as in `docs/format.md`.
        row_shape: The shape of a row.
        row_bytes: Bytes of a row in its file.
        rows: The number of rows.
        segments: Where all rows are, in their order.
        checks: CRC-32C of each 4,096 bytes of each segment in turn; the last block of a segment may
            be shorter. None if no checksums are stored or requested.
        padding_bytes: How many of `row_bytes`, at the end, are padding.
        checkpoint: The checkpoint that holds the table, not removed before `release`; None for
            files of other formats.
        opener: Opens the blocks of a sealed table; None for a clear one.
    """

    path: str
    key: str
    dtype: str
    row_shape: tuple[int, ...]
    row_bytes: int
    rows: int
    segments: tuple[RowSegment, ...]
    checks: np.ndarray[Any, Any] | None = None
    padding_bytes: int = 0
    checkpoint: CheckpointTables | None = field(default=None, compare=False, repr=False)
    opener: _native.BlockOpener | None = field(default=None, compare=False, repr=False)

    @property
    def is_checked(self) -> bool:
        """Whether each read is compared with checksums or tags."""
        return self.checks is not None or self.opener is not None

    def release(self) -> None:
        """Allows the files of the checkpoint to be removed."""
        if self.checkpoint is not None:
            self.checkpoint.release()

    def check_digests(self, path: str) -> None:
        """Compares all rows in one file of a checkpoint with the checkpoint's digests."""
        if self.checkpoint is None:
            raise AssertionError("files of others have no digests")
        for one in self.segments:
            if one.path == path:
                self.checkpoint.check_digests(path, one.offset, one.rows * self.row_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.checkpoint is not None and self.checkpoint.is_sealed:
            raise TypeError(
                f"{self.path} is sealed, and its key is not pickled: open the table in each process"
            )
        if self.checkpoint is not None and self.checkpoint.is_signed:
            raise TypeError(
                f"{self.path} was opened with signed_by=, which is not pickled: open the table in "
                "each process"
            )
        if self.checkpoint is not None:
            # Each process that reads a checkpoint takes its own lease on it.
            return _reopened, (
                self.checkpoint.path,
                self.key,
                self.checks is not None,
                self.segments,
            )
        return _made_again, ({one.name: getattr(self, one.name) for one in fields(self)},)


def _made_again(values: dict[str, Any]) -> Source:
    return Source(**values)


def _reopened(path: str, key: str, check: bool, segments: tuple[RowSegment, ...]) -> Source:
    source = find(path, key, check=check)
    if source.segments == segments:
        # Keeps the marks of the process that found the table: changes since then count.
        return replace(source, segments=segments)
    source.release()
    raise CorruptCheckpointError(
        f"{path} has changed since {key!r} was opened by the process that passed it here: open it"
        " there again",
        path=path,
        tensor=key,
    )


class _TableRequest(NamedTuple):
    """The caller's description of the table.

    Attributes:
        path: Where it is.
        key: Its name, if given.
        shape: Its shape, if given; None in the first place for any number of rows.
        dtype: Name of its element type, if given.
    """

    path: str
    key: str | None
    shape: tuple[int | None, ...] | None
    dtype: str | None


def find(
    path: str | os.PathLike[str] | bytes,
    key: str | None = None,
    *,
    shape: Sequence[int | None] | None = None,
    dtype: Any = None,
    check: bool = True,
    stacklevel: int = 1,
    unsealing: Unsealing = CLEAR,
) -> Source:
    """Finds a table and compares the caller's description with its files; reads no rows.

    Args:
        path: As `penstock.features.open` takes it, like the next three.
        key: Name of the tensor.
        shape: Its shape.
        dtype: Its element type.
        check: Whether the checksums of its blocks are read, if there are any.
        stacklevel: Stack level for warnings, counted from the caller.
        unsealing: How a sealed checkpoint is opened, and whether clear tables are refused.
    """
    if not isinstance(key, str | None):
        raise TypeError(f"key={key!r:.80}: must be the name of a tensor, or None")
    request = _TableRequest(
        # A later change of the working directory does not affect it.
        os.path.abspath(decode_local_path(path)),
        key,
        None if shape is None else sizes_of(shape),
        None if dtype is None else name_of(dtype),
    )
    if not os.path.exists(request.path):
        raise CheckpointNotFoundError(
            f"{request.path}: nothing is there: name the checkpoint or file that has the table",
            path=request.path,
        )
    try:
        if os.path.isdir(request.path):
            if os.path.exists(os.path.join(request.path, _native.TABLE_MANIFEST)):
                told = f"{request.path} {as_table(request.path)}"
                raise CheckpointNotFoundError(told, path=request.path)
            if _is_ours(request.path):
                return _in_checkpoint(request, unsealing, check=check, stacklevel=stacklevel + 1)
            unsealing.refuse_other(request.path, request.path)
            tables = other_formats.of_directory(request.path, key)
            return _of_one(request, tables)
        unsealing.refuse_other(request.path, request.path)
        return _in_file(request)
    except OSError as error:
        if isinstance(error, StorageError | CheckpointNotFoundError):
            raise
        raise StorageError(
            f"cannot read {error.filename or request.path}: {error.strerror}",
            path=os.fspath(error.filename or request.path),
            errno=error.errno,
        ) from error


def _is_ours(path: str) -> bool:
    """Whether a directory is a checkpoint or a store, or an unfinished save of one."""
    # Shards of an unfinished save look like safetensors files, but may lack bytes.
    return is_penstock(path) or any(map(_is_shard, os.listdir(path)))


def _is_shard(name: str) -> bool:
    return rank_of(name) is not None


# Locating the tensor.


def _in_checkpoint(
    request: _TableRequest, unsealing: Unsealing, *, check: bool, stacklevel: int
) -> Source:
    checkpoint = CheckpointTables(request.path, stacklevel=stacklevel + 1, unsealing=unsealing)
    try:
        tables = checkpoint.tables
        if request.key is not None and tables.keys().isdisjoint(
            (request.key, escaped(request.key))
        ):
            tables = {**tables, **checkpoint.parts()}
        key = _chosen(request, tables)
        source = _source(request, key, tables[key], checkpoint)
        if unsealing.signers is not None:
            for one in source.segments:
                checkpoint.check_digests(one.path, one.offset, one.rows * source.row_bytes)
        blocks = sum(-(-one.rows * source.row_bytes // BLOCK_BYTES) for one in source.segments)
        if checkpoint.is_sealed and not source.segments:
            return source
        if checkpoint.is_sealed:
            # Rows in several segments are not from `write`, which the opener refuses.
            opener = checkpoint.opener(key, source.segments[0].path, blocks)
            return replace(source, opener=opener)
        if not check:
            return source
        return replace(source, checks=checkpoint.checks(key, blocks))
    except BaseException:
        checkpoint.release()
        raise


def _in_file(request: _TableRequest) -> Source:
    path = request.path
    above, name = os.path.split(path)
    if not os.path.isfile(path):
        raise StorageError(f"{path} is neither a file nor a directory", path=path, errno=None)
    if _is_shard(name):
        raise CheckpointNotFoundError(
            f"{path} is a file of a checkpoint: pass the directory that it is in, {above or '.'!r}",
            path=path,
        )
    check_fetched(path)
    if other_formats.is_npy(path):
        return _source(request, "", other_formats.of_npy(path, request.dtype))
    if (
        request.shape is not None
        and request.dtype is not None
        and not path.endswith(".safetensors")
    ):
        return _source(request, "", other_formats.of_bytes(path, request.shape, request.dtype))
    if other_formats.is_safetensors(path):
        return _of_one(request, other_formats.of_safetensors(path))
    raise StateMismatchError(
        f"{path} does not begin as a file of safetensors or of numpy.save does: where it is rows"
        " and nothing else, pass shape= and dtype=",
        path=path,
    )


def _of_one(request: _TableRequest, tables: Mapping[str, RowTensor]) -> Source:
    key = _chosen(request, tables)
    return _source(request, key, tables[key])


def _chosen(request: _TableRequest, tables: Mapping[str, RowTensor]) -> str:
    """The name of the requested tensor, or of the only one that is a table."""
    path, key = request.path, request.key
    if key is not None:
        # Accepts a key as in the state, too; stored names escape it with backslashes.
        for name in (key, escaped(key)):
            if name in tables:
                return name
        inside = sorted(name for name in tables if name.startswith(f"{key}."))
        if inside:
            raise StateMismatchError(
                f"{path}: {key!r} is no table: name one that is in it: {_shown(inside)}",
                key=key,
                path=path,
            )
        raise StateMismatchError(
            f"{path} has no tensor {key!r}: there is {_shown(sorted(tables))}", key=key, path=path
        )
    likely = [name for name, one in tables.items() if len(one.shape) > 1] or list(tables)
    if len(likely) == 1:
        return likely[0]
    if not likely:
        raise StateMismatchError(f"{path} has no tensor: name what has a table", path=path)
    raise StateMismatchError(
        f"{path} has {len(likely)} tensors, pass key= with one of them: {_shown(sorted(likely))}",
        path=path,
    )


def _shown(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(map(repr, names[:_SHOWN_MAX])) + more


# Describing the table.


def _source(
    request: _TableRequest, key: str, table: RowTensor, checkpoint: CheckpointTables | None = None
) -> Source:
    name = repr(key) if key else "the array"
    if not table.shape:
        raise UnsupportedStateError(
            f"{request.path}: {name} is a single number and has no rows: name a table", key=key
        )
    row_shape = table.shape[1:] if checkpoint is None else checkpoint.row_shape(key, table)
    _check_said(request, name, (table.shape[0], *row_shape), table.dtype)
    row_bytes = table.row_bytes
    value_bytes = math.prod(row_shape) * table.item_bytes
    if value_bytes == 0:
        raise UnsupportedStateError(
            f"{request.path}: rows of {name} are of the shape {row_shape} and have no bytes",
            key=key,
        )
    return Source(
        path=request.path,
        key=key,
        dtype=table.dtype,
        row_shape=row_shape,
        row_bytes=row_bytes,
        rows=table.shape[0],
        segments=_segments(request.path, key, table),
        checks=None,
        padding_bytes=row_bytes - value_bytes,
        checkpoint=checkpoint,
    )


def _check_said(request: _TableRequest, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Raises `StateMismatchError` unless the table is as the caller describes it."""
    said = request.shape
    if said is not None and said not in (shape, (None, *shape[1:])):
        raise StateMismatchError(
            f"{request.path}: {name} is of the shape {shape}, not of shape={said}: correct it, or"
            " leave it out",
            path=request.path,
        )
    if request.dtype not in (None, dtype):
        raise StateMismatchError(
            f"{request.path}: {name} is of {dtype}, not of dtype={request.dtype!r}: correct it, or"
            " leave it out",
            path=request.path,
        )


def _segments(path: str, key: str, table: RowTensor) -> tuple[RowSegment, ...]:
    runs = table.runs
    if runs is None:
        raise _scattered(path, key, "its rows are cut into columns, or it is a transposed view")
    if sum(run.nbytes for run in runs) != table.nbytes:
        raise CorruptCheckpointError(
            f"{path}: parts of {key!r} were never saved: load the checkpoint with the ranks that"
            " have them, and save it whole",
            path=path,
            tensor=key,
        )
    row_bytes = table.row_bytes
    marks: dict[str, FileMark] = {}
    found: list[RowSegment] = []
    first_row = 0
    for run in _joined(runs):
        if run.nbytes % row_bytes:
            raise _scattered(path, key, "ranks have cut rows of it into columns")
        if run.path not in marks:
            marks[run.path] = FileMark.of(os.stat(run.path))
        if run.offset + run.nbytes > marks[run.path].nbytes:
            raise CorruptCheckpointError(
                f"{run.path}: it ends before the rows of {key!r} do: get the file again",
                path=os.path.dirname(run.path),
                file=os.path.basename(run.path),
                tensor=key or None,
            )
        rows = run.nbytes // row_bytes
        found.append(
            RowSegment(
                path=run.path,
                offset=run.offset,
                first_row=first_row,
                rows=rows,
                mark=marks[run.path],
            )
        )
        first_row += rows
    return tuple(found)


def _joined(runs: Sequence[FileRange]) -> list[FileRange]:
    """Merges adjacent file ranges."""
    starts = [0, *(index for index, pair in enumerate(pairwise(runs), 1) if not _follows(*pair))]
    groups = [runs[first:last] for first, last in pairwise([*starts, len(runs)])]
    return [
        FileRange(group[0].path, group[0].offset, sum(run.nbytes for run in group))
        for group in groups
        if group
    ]


def _follows(one: FileRange, next_one: FileRange) -> bool:
    return one.path == next_one.path and one.offset + one.nbytes == next_one.offset


def _scattered(path: str, key: str, why: str) -> UnsupportedStateError:
    return UnsupportedStateError(
        f"{path}: rows of {key!r} do not lie together: {why}; have one process load the checkpoint"
        " and write the table with penstock.features.write",
        key=key,
    )
