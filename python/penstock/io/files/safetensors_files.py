"""Parses headers of safetensors files: dtype, shape and byte range of each tensor.

The native module parses them, for Penstock's shards and for other files, by the rules of the
safetensors library (https://github.com/huggingface/safetensors). That library reads tensors, but
does not expose their offsets.
"""

from __future__ import annotations

import os
from typing import BinaryIO, NamedTuple

from penstock import _native
from penstock.common.found import of_git_lfs, unfetched
from penstock.errors import UnsupportedStateError

_LENGTH_BYTES = 8
SNIFFED_BYTES = 64
"""Number of leading bytes of a file that `begins_header` examines."""
_BLANKS = b" \t\r\n"


class Described(NamedTuple):
    """A tensor as described by a header.

    Attributes:
        kind: The header's name of the element type.
        dtype: The name of that type in `docs/format.md`; None if it has none, or if rows end within
            an element.
        shape: The sizes in elements of ``dtype``; the header's sizes if ``dtype`` is None.
        begin: Offset of the first byte in the file.
        end: Offset of the byte after the last.
    """

    kind: str
    dtype: str | None
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The contents of a file's header.

    Attributes:
        tensors: By name, in the order of the header.
        metadata: The writer's notes.
    """

    tensors: dict[str, Described]
    metadata: dict[str, str]


def begins_header(start: bytes) -> bool:
    """Tells whether a file begins with a header's length and its first byte."""
    # The library allows blanks before the header's JSON object.
    return start[6:8] == b"\0\0" and start[8:].lstrip(_BLANKS)[:1] == b"{"


def read_header(file: BinaryIO, path: str, start: int = 0) -> Header:
    """Reads the header of safetensors data that starts at an offset and ends with the file."""
    nbytes = os.fstat(file.fileno()).st_size - start
    file.seek(start)
    first = file.read(SNIFFED_BYTES)
    if of_git_lfs(first):
        raise unfetched(path)
    end = _native.header_end(path, first[:_LENGTH_BYTES], nbytes)
    first += file.read(max(end - len(first), 0))
    data_start, metadata, rows = _native.parse_header(path, first[:end], nbytes)
    begin = start + data_start
    tensors = {
        row.name: Described(row.kind, row.dtype, row.shape, begin + row.begin, begin + row.end)
        for row in rows
    }
    return Header(tensors, metadata)


def dtype_of(path: str, name: str, tensor: Described) -> str:
    """Returns the element type of a tensor by its name in `docs/format.md`."""
    if tensor.dtype is None:
        raise UnsupportedStateError(
            f"{path}: {name!r} has elements of the type {tensor.kind} in the shape"
            f" {list(tensor.shape)}, which no type of PyTorch holds: convert the tensor with the"
            " program that wrote it, or try a newer Penstock",
            key=name,
        )
    return tensor.dtype
