"""`open_indexed`: opens an indexed dataset of Megatron-Core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.features.indexed.indexed_rows import IndexedRows

if TYPE_CHECKING:
    import os

    from penstock.io.tensor_io import TensorIO


def open_indexed(
    prefix: str | os.PathLike[str] | bytes,
    *,
    multimodal: bool = False,
    gap_bytes: int | None = None,
    io: TensorIO | None = None,
) -> IndexedRows:
    """Opens an indexed dataset, as Megatron-Core writes it, to read its rows by id.

    Neither Megatron-Core nor PyTorch is needed for it.

    Args:
        prefix: Path of the dataset, without ``.idx`` and ``.bin``.
        multimodal: Whether each row has a mode, as Megatron-Core's argument of that name; the files
            do not say it.
        gap_bytes: Bytes that the device reads in the time of one request, 16 KiB: gaps between rows
            are read where that saves an eighth of the batch's time. 0 never reads gaps.
        io: Settings of the I/O workers, as `penstock.offload.TensorIO` takes them.

    Raises:
        CheckpointNotFoundError: There is no index at the path.
        StateMismatchError: The ``.idx`` file is no index.
        FormatVersionError: The index has a later version, or an unknown element type.
        CorruptCheckpointError: The index is shorter than its header says, or its rows are not those
            of its documents.
        StorageError: A file cannot be read, or the requested engine cannot run.
        UnsupportedStateError: Requests of ``io`` are shorter than 12 KiB.
        ValueError: ``gap_bytes`` is out of range.

    Example:
        >>> import numpy as np, penstock.features, struct, tempfile
        >>> prefix = tempfile.mkdtemp() + "/texts"
        >>> rows = [np.arange(3, dtype=np.uint16), np.arange(3, 5, dtype=np.uint16)]
        >>> with open(f"{prefix}.bin", "wb") as data, open(f"{prefix}.idx", "wb") as index:
        ...     written = data.write(b"".join(row.tobytes() for row in rows))
        ...     written = index.write(struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, 2, 2))
        ...     written = index.write(struct.pack("<2i2q2q", 3, 2, 0, 6, 0, 2))
        >>> with penstock.features.open_indexed(prefix) as texts:
        ...     texts.get(1), texts.gather([1, 0]).values
        (array([3, 4], dtype=uint16), array([3, 4, 0, 1, 2], dtype=uint16))
    """
    return IndexedRows(prefix, multimodal=multimodal, gap_bytes=gap_bytes, io=io)
