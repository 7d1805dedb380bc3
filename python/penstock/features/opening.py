"""`open`: opens a table of any supported format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.features.features import Features
from penstock.features.sources.source import find
from penstock.sealing.unsealing import Unsealing

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from penstock.features.cache import Cache
    from penstock.io.tensor_io import TensorIO
    from penstock.sealing.identities import Identities
    from penstock.sealing.passphrase import Key
    from penstock.signing import SignatureKey, Signers


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
    identities: Identities | Key | Iterable[Key] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> Features:
    """Opens a table, to read its rows by id.

    A row is everything behind the tensor's first dimension.

    Args:
        path: The directory of a Penstock checkpoint, or of a store, whose newest complete step is
            used; a safetensors file, or a directory of them, with or without an index; a ``.npy``
            file; or a file of rows without a header.
        key: Name of the tensor, if there are several.
        shape: Shape of the table, required for a file without a header; None in the first place for
            as many rows as there are. For other files it must be the stored shape.
        dtype: Type of the elements, likewise.
        cache: Keeps rows in memory; see `Cache`.
        check: Whether rows are compared with checksums, where the table has them.
        gap_bytes: Bytes that the device reads in the time of one request, 16 KiB: gaps between rows
            are read where that saves an eighth of the batch's time. 0 never reads gaps.
        io: Settings of the I/O workers, as `penstock.offload.TensorIO` takes them.
        identities: Keys that open a table of ``write(sealing=…)``, as for `penstock.load`; tables
            that are not sealed are then refused. Default: those of ``PENSTOCK_IDENTITIES``, which
            refuse nothing. Blocks are opened after each read, whatever ``check`` is; rows in a
            cache are clear. A sealed table is not pickled.
        signed_by: Public keys of which one must have signed the checkpoint, as for `penstock.load`;
            other tables are refused. All bytes of the table are read and compared with the signed
            hashes now, before any row is handed out. Rows read later are compared with their
            checksums alone, so exchange no file of an open table. Such a table is not pickled.

    Raises:
        CheckpointNotFoundError: There is nothing at the path, or nothing that has tables.
        IncompleteCheckpointError: The save there never finished.
        CorruptCheckpointError: A file contradicts its header, or is damaged.
        StateMismatchError: There is no such table, or it has another shape, type or size.
        UnsupportedStateError: Rows are not contiguous in their files, have no bytes, or are longer
            than a request.
        StorageError: A file cannot be read, or the requested engine cannot run.
        ValueError: An argument is out of range, or the cache has rows of another size.
        SealedError: The table is sealed, and there are no identities.
        NotSealedError: ``identities`` are given, and the table is not sealed.
        WrongKeyError: The identities do not open the table.
        TamperedError: Somebody without the key has changed the checkpoint. A gather raises it for
            a block that is not the one that was sealed for its place.
        SignatureError: None of ``signed_by`` has signed the checkpoint, or its bytes are not the
            signed ones; `NotSignedError` if the table has no signature.

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
    unsealing = Unsealing.of(identities, signed_by=signed_by)
    source = find(
        path, key, shape=shape, dtype=dtype, check=check, stacklevel=2, unsealing=unsealing
    )
    try:
        return Features(source, cache=cache, gap_bytes=gap_bytes, io=io)
    except BaseException:
        source.release()
        raise
