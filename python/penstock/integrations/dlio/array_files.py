"""Arrays of ``.npy`` and ``.npz`` files, read by direct I/O into memory that is used again.

A file is read whole, many requests at a time; an archive is read only where the wanted member lies.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from penstock.errors import CorruptCheckpointError, UnsupportedStateError
from penstock.offload import Buffers, TensorIO

if TYPE_CHECKING:
    from penstock.offload import DataFile

_BUFFER_BYTES_MAX = 1 << 40
"""No bound of ours: a reader of DLIO holds the files that its run file says."""

_HEADER_BYTES_MAX = 1 << 16
"""More than the header of any array of numbers."""

_LOCAL_HEADER_BYTES = 30
_LOCAL_HEADER_BEGIN = b"PK\x03\x04"
_NO_NPY = (ValueError, TypeError, SyntaxError, TokenError, MemoryError, RecursionError)
"""Errors raised by a malformed header, which NumPy parses as a Python literal."""


class _Member(NamedTuple):
    """A member of an archive.

    Attributes:
        begin: Offset of its bytes in the file.
        nbytes: Their number, as stored.
        is_deflated: Whether they are compressed.
        crc: The CRC-32 of the member.
    """

    begin: int
    nbytes: int
    is_deflated: bool
    crc: int


class ArrayFiles:
    """Reads arrays of NumPy's files; the memory of an array is used again when it is gone."""

    def __init__(self) -> None:
        self._io = TensorIO()
        self._buffers = Buffers(_BUFFER_BYTES_MAX)

    def npy(self, path: str) -> np.ndarray[Any, Any]:
        """Returns the array of a ``.npy`` file.

        Raises:
            StorageError: The file cannot be read.
            CorruptCheckpointError: It is no such file, or too short.
            UnsupportedStateError: Its elements are Python objects.
        """
        with self._io.open(path) as file:
            return _array(self._read(file, 0, file.nbytes), path)

    def npz(self, path: str, key: str) -> np.ndarray[Any, Any]:
        """Returns an array of a ``.npz`` file, compressed or not.

        Args:
            path: The file.
            key: Name of the array.

        Raises:
            StorageError: The file cannot be read.
            CorruptCheckpointError: It is no archive, has no such array, or is damaged.
            UnsupportedStateError: Its elements are Python objects, or it is packed in another way
                than NumPy does.
        """
        with self._io.open(path) as file:
            member = _member(path, f"{key}.npy")
            data = self._read(file, member.begin, member.nbytes)
        if member.is_deflated:
            data = _inflate(data, path)
        if zlib.crc32(data.data) != member.crc:
            raise _broken(path, f"{key!r} differs from its CRC-32")
        return _array(data, path)

    def _read(self, file: DataFile, begin: int, nbytes: int) -> np.ndarray[Any, Any]:
        data: np.ndarray[Any, Any] = self._buffers.empty(nbytes, np.uint8)
        if nbytes:
            self._io.read(data, file, begin).result()
        return data


def _member(path: str, name: str) -> _Member:
    """Finds a member by the directory at the end of the archive."""
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            found = archive.getinfo(name)
            file.seek(found.header_offset)
            local = file.read(_LOCAL_HEADER_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _broken(path, f"it is no .npz file with {name}: {error}") from error
    if len(local) < _LOCAL_HEADER_BYTES or not local.startswith(_LOCAL_HEADER_BEGIN):
        raise _broken(path, f"no header of {name} is where its directory says")
    if found.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnsupportedStateError(
            f"{path}: {name} is packed by method {found.compress_type}: write it with numpy.savez "
            "or numpy.savez_compressed",
            key=path,
        )
    names_bytes = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    return _Member(
        found.header_offset + _LOCAL_HEADER_BYTES + names_bytes,
        found.compress_size,
        found.compress_type == zipfile.ZIP_DEFLATED,
        found.CRC,
    )


def _inflate(data: np.ndarray[Any, Any], path: str) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(zlib.decompress(data.data, wbits=-zlib.MAX_WBITS), np.uint8)
    except zlib.error as error:
        raise _broken(path, f"it cannot be unpacked: {error}") from error


def _array(data: np.ndarray[Any, Any], path: str) -> np.ndarray[Any, Any]:
    """The array in the bytes of a ``.npy`` file, which stay its memory."""
    head = io.BytesIO(data[:_HEADER_BYTES_MAX].tobytes())
    try:
        version = npy.read_magic(head)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its version is {version[0]}.{version[1]}")
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(head)
    except _NO_NPY as error:
        raise _broken(path, f"its header is none of numpy.save: {error}") from error
    if dtype.hasobject:
        raise UnsupportedStateError(
            f"{path}: its elements are Python objects, whose pickles can run any code: generate "
            "the data as numbers",
            key=path,
        )
    begin, nbytes = head.tell(), math.prod(shape) * dtype.itemsize
    if nbytes > len(data) - begin:
        raise _broken(path, f"its array takes {nbytes} bytes, and {len(data) - begin} are there")
    flat = data[begin : begin + nbytes].view(dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _broken(path: str, why: str) -> CorruptCheckpointError:
    above, name = os.path.split(path)
    return CorruptCheckpointError(f"{path}: {why}: generate the data again", path=above, file=name)
