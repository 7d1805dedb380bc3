"""Headers of safetensors files: which tensor lies where.

The native module parses them, for shards of Penstock and for files of others, by the rules of the
safetensors library (https://github.com/huggingface/safetensors). That library reads tensors, but
does not say where they lie.
"""

from __future__ import annotations

import os
from typing import BinaryIO, NamedTuple

from penstock import _native
from penstock.common.found import of_git_lfs, unfetched
from penstock.errors import UnsupportedStateError

_LENGTH_BYTES = 8
SNIFFED_BYTES = 64
"""Bytes of a file's start that `begins_header` looks at."""
_BLANKS = b" \t\r\n"


class Described(NamedTuple):
    """A tensor as a header describes it.

    Attributes:
        kind: The header's name for the type of its elements.
        dtype: The name that `docs/format.md` has for that; None where there is none, or where rows
            end within an element.
        shape: Its sizes in elements of ``dtype``; as the header has them where that is None.
        begin: Its first byte in the file.
        end: The byte after its last one.
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
        metadata: Notes of whoever wrote it.
    """

    tensors: dict[str, Described]
    metadata: dict[str, str]


def begins_header(start: bytes) -> bool:
    """Whether the first bytes of a file are the length of a header and its beginning.

    Args:
        start: The first `SNIFFED_BYTES` of the file.
    """
    # The library allows blanks before the header's object.
    return start[6:8] == b"\0\0" and start[8:].lstrip(_BLANKS)[:1] == b"{"


def read_header(file: BinaryIO, path: str, start: int = 0) -> Header:
    """The header of what begins somewhere in an open file and ends with it.

    Args:
        file: Opened to read bytes.
        path: Its path, for errors.
        start: Where in it the header's length is, in bytes.

    Raises:
        CheckpointNotFoundError: It is a pointer of Git LFS.
        CorruptCheckpointError: The safetensors library refuses it, too.
        UnsupportedStateError: The library reads it, and Penstock does not.
        OSError: It cannot be read.
    """
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
        name: Described(
            kind,
            None if ours is None else ours[0],
            tuple(shape if ours is None else ours[1]),
            begin + offsets[0],
            begin + offsets[1],
        )
        for name, kind, ours, shape, offsets in rows
    }
    return Header(tensors, metadata)


def dtype_of(path: str, name: str, tensor: Described) -> str:
    """The type of a tensor's elements, as `docs/format.md` calls it.

    Raises:
        UnsupportedStateError: It has none.
    """
    if tensor.dtype is None:
        raise UnsupportedStateError(
            f"{path}: {name!r} has elements of the type {tensor.kind} in the shape"
            f" {list(tensor.shape)}, which no type of PyTorch holds: convert the tensor with the"
            " program that wrote it, or try a newer Penstock",
            key=name,
        )
    return tensor.dtype
