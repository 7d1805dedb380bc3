"""`publish`: turns files of tables into a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.loading.path_kind import check_no_store
from penstock.checkpoint.state.flatten import flatten
from penstock.errors import StorageError
from penstock.io.tensor_io import TensorIO
from penstock.reports import Fallback
from penstock.tensors.arguments import to_native

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.checkpoint.state.flattened import Flattened
    from penstock.options import Options
    from penstock.sealing.sealing import Sealing

_RANK = 0
_SHARD = 99
"""Shard number of the first file of rows while it is written; the commit gives the files the names
of the first shards."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def publish(
    where: str,
    keys: Sequence[str],
    fill: Callable[[TensorIO, Mapping[str, str]], Mapping[str, Any]],
    *,
    metadata: str,
    overwrite: bool,
    options: Options,
    needed_bytes: int | None,
    sealing: Sealing | None = None,
) -> tuple[str, tuple[Fallback, ...]]:
    """Lets a function write files of tables, and commits them as a checkpoint, durably.

    Args:
        where: The checkpoint's directory.
        keys: Names of the tables.
        fill: Writes the file of each table to the path given for its key, and returns the state of
            the checkpoint: tensors of those files, and others.
        metadata: The metadata as it is stored.
        overwrite: Replace a complete checkpoint that is there.
        options: Settings of the I/O.
        needed_bytes: Bytes of the rows; None if unknown.
        sealing: For whom the checkpoint is sealed; the files have to be sealed already.

    Returns:
        The checkpoint's identity, and what could not be deleted.
    """
    job_options = to_native(options)
    check_no_store(where)
    # Fails before anything is written if a key management service cannot be reached.
    key = None if sealing is None else sealing.wrap_new()
    attempt = _native.Attempt.begin(where, overwrite=bool(overwrite))
    names = (
        _native.shard_file(_RANK, number, attempt.id)
        for number in range(_SHARD, _SHARD + len(keys))
    )
    places = dict(zip(keys, (os.path.join(where, name) for name in names), strict=True))
    try:
        if key is not None:
            attempt.seal(key)
        with _io(options) as io:
            flat = flatten(fill(io, places))
            job = _job(where, flat, job_options, is_sealed=key is not None)
            vote = job.write(attempt, _RANK)["vote"]
        committed = attempt.commit(
            [(_RANK, *vote)], step=None, metadata=metadata, overwrite=bool(overwrite)
        )
    except StorageError as error:
        if error.errno in _FULL and error.path in places.values():
            raise _full(where, error, needed_bytes) from error
        raise
    finally:
        # Committed files have a second link, under their final name.
        for place in places.values():
            with contextlib.suppress(OSError):
                os.unlink(place)
        attempt.abandon()
    left_behind = committed["left_behind"]
    leftovers = () if left_behind is None else (Fallback(left_behind, "leftover"),)
    return committed["checkpoint_id"], leftovers


def _io(options: Options) -> TensorIO:
    return TensorIO(
        engine=options.engine,
        direct=options.direct,
        queue_depth=options.queue_depth,
        io_threads=options.io_threads,
        extent_bytes=options.extent_bytes,
    )


def _job(path: str, flat: Flattened, options: dict[str, Any], *, is_sealed: bool) -> _native.Job:
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
        sealed=is_sealed,
    )


def _full(path: str, error: StorageError, needed_bytes: int | None) -> StorageError:
    takes = "" if needed_bytes is None else f", which takes {needed_bytes} bytes"
    return StorageError(
        f"{path}: no room for the table{takes}: {os.strerror(error.errno or 0)}: free some, and"
        " write it again: nothing has been changed",
        path=path,
        errno=error.errno,
        needed_bytes=needed_bytes,
    )
