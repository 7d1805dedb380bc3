"""`IndexFile`: the index (``.idx``) of an indexed dataset, as Megatron-Core writes it."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    StateMismatchError,
    StorageError,
)
from penstock.io.files.file_marks import FileMark

if TYPE_CHECKING:
    from typing import BinaryIO

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_FIXED = struct.Struct("<9sQBQQ")
"""Magic, version, code of the element type, number of rows, number of document indices."""
_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}
_LENGTH, _POINTER, _DOCUMENT, _MODE = (np.dtype(kind) for kind in ("<i4", "<i8", "<i8", "i1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """An index: where the rows of an indexed dataset are in its data file.

    The arrays are mapped from the file: processes that open it share their memory, and pages that
    nobody looks at are never read.

    Attributes:
        path: The file.
        dtype: Name of the element type of rows, as in `docs/format.md`.
        item_bytes: Bytes of an element.
        lengths: Elements of each row, ``int32``.
        pointers: Where each row begins in the data file, in bytes, ``int64``.
        documents: The first row of each document, and the number of rows at the end, ``int64``.
        modes: The mode of each row, ``int8``; None unless the dataset is multimodal.
        mark: Identity of the file when it was opened.
    """

    path: str
    dtype: str
    item_bytes: int
    lengths: np.ndarray[Any, np.dtype[np.int32]]
    pointers: np.ndarray[Any, np.dtype[np.int64]]
    documents: np.ndarray[Any, np.dtype[np.int64]]
    modes: np.ndarray[Any, np.dtype[np.int8]] | None
    mark: FileMark

    @classmethod
    def open(cls, path: str, *, multimodal: bool) -> IndexFile:
        """Opens an index; compares its header with its size, and reads no more than the header.

        Args:
            path: The file.
            multimodal: Whether the index has a mode for each row. The file does not say it.

        Raises:
            CheckpointNotFoundError: There is no file at the path.
            StateMismatchError: The file is no index.
            FormatVersionError: The index has a later version, or an unknown element type.
            CorruptCheckpointError: The file is shorter than its header says, or its rows are not
                those of its documents.
            StorageError: The file cannot be read.
        """
        try:
            with open(path, "rb") as file:
                return _opened(path, file, multimodal)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"{path}: nothing is there: pass the path of the dataset without .idx and .bin",
                path=path,
            ) from None
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"cannot read {path}: {error.strerror}", path=path, errno=error.errno
            ) from error


def _opened(path: str, file: BinaryIO, multimodal: bool) -> IndexFile:
    mark = FileMark.of(os.fstat(file.fileno()))
    start = file.read(_FIXED.size)
    if start[: len(MAGIC)] != MAGIC:
        raise StateMismatchError(
            f"{path} is no index of an indexed dataset: it does not begin with MMIDIDX",
            path=path,
        )
    if len(start) < _FIXED.size:
        raise _broken(path, f"it has {len(start)} bytes, fewer than a header")
    _, version, code, rows, documents = _FIXED.unpack(start)
    if version != VERSION or code not in _DTYPES:
        unknown = f"version {version}" if version != VERSION else f"the element type {code}"
        raise FormatVersionError(
            f"{path}: {unknown} is not known to this Penstock, which reads version {VERSION} with"
            f" the types 1 to {max(_DTYPES)}: upgrade Penstock",
            path=path,
            found=version,
            supported=VERSION,
        )
    kinds = [(_LENGTH, rows), (_POINTER, rows), (_DOCUMENT, documents)]
    if multimodal:
        kinds.append((_MODE, rows))
    needed = _FIXED.size + sum(kind.itemsize * count for kind, count in kinds)
    if needed > mark.nbytes:
        modes = ", with a mode for each as multimodal=True says," if multimodal else ""
        raise _broken(
            path,
            f"its {rows} rows and {documents} document indices{modes} take {needed} bytes, and it"
            f" has {mark.nbytes}",
        )
    content = np.memmap(file, np.uint8, "r", shape=(needed,))
    arrays, offset = [], _FIXED.size
    for kind, count in kinds:
        arrays.append(np.ndarray((count,), kind, content, offset))
        offset += kind.itemsize * count
    lengths, pointers, starts, *modes_of_rows = arrays
    if documents == 0 or starts[-1] != rows:
        last = "there are none" if documents == 0 else f"they end with {starts[-1]}"
        raise _broken(path, f"its document indices have to end with the {rows} rows, and {last}")
    dtype = _DTYPES[code]
    return IndexFile(
        path=path,
        dtype=dtype,
        item_bytes=np.dtype(dtype).itemsize,
        lengths=lengths,
        pointers=pointers,
        documents=starts,
        modes=modes_of_rows[0] if modes_of_rows else None,
        mark=mark,
    )


def _broken(path: str, defect: str) -> CorruptCheckpointError:
    directory, name = os.path.split(path)
    return CorruptCheckpointError(
        f"{path}: {defect}: get the file again", path=directory, file=name
    )
