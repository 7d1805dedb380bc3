"""`open`: a table of rows, whoever has written it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.features.features import Features
from penstock.features.source import find

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from penstock.features.cache import Cache
    from penstock.io.tensor_io import TensorIO


def open(
    path: str | os.PathLike[str] | bytes,
    key: str | None = None,
    *,
    shape: Sequence[int | None] | None = None,
    dtype: Any = None,
    cache: Cache | None = None,
    check: bool = True,
    gap_bytes: int | None = None,
    io: TensorIO | None = None,
) -> Features:
    """Opens a table, to read rows of it by id.

    Rows are everything behind the first dimension.

    Args:
        path: The directory of a checkpoint of Penstock, or of a store, whose newest complete step
            is taken; a safetensors file, or a directory of them, with an index or without; a
            ``.npy`` file; or a file that is rows and nothing else.
        key: Name of the tensor, where there are several.
        shape: Its sizes, for a file without a header; None in the place of the first for as many
            rows as there are. Elsewhere they have to be what is stored.
        dtype: Its type, likewise.
        cache: Has rows stay in memory; see `Cache`.
        check: Whether what is read is compared with checksums, where there are any.
        gap_bytes: What the device reads in the time of a request, 16 KiB: bytes between rows are
            read where that saves an eighth of the batch's time. 0 for never.
        io: Settings of the workers, as `penstock.offload.TensorIO` takes them.

    Raises:
        CheckpointNotFoundError: There is nothing at the path, or nothing that has tables.
        IncompleteCheckpointError: The save there never finished.
        CorruptCheckpointError: A file is not what its header says, or damaged.
        StateMismatchError: There is no such table, or another shape, type or size.
        UnsupportedStateError: The rows do not lie together, have no bytes, or are longer than a
            request.
        StorageError: A file cannot be read, or the engine that was asked for cannot run.
        ValueError: A value is out of range, or the cache has rows of another size.

    Example:
        >>> import numpy as np, penstock.features, tempfile
        >>> path = tempfile.mkdtemp() + "/table"
        >>> rows = np.arange(12, dtype=np.float32).reshape(4, 3)
        >>> report = penstock.features.write(path, rows)
        >>> with penstock.features.open(path) as table:
        ...     table.gather([3, 0, 3])
        array([[ 9., 10., 11.],
               [ 0.,  1.,  2.],
               [ 9., 10., 11.]], dtype=float32)
    """
    source = find(path, key, shape=shape, dtype=dtype, check=check, stacklevel=2)
    try:
        return Features(source, cache=cache, gap_bytes=gap_bytes, io=io)
    except BaseException:
        source.release()
        raise
