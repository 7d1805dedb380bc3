"""Chunks of a file sealed with a key of its own: sealed before a write, opened after a read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.errors import TamperedError
from penstock.tensors.file_tensor import CHUNK_BYTES
from penstock.tensors.native_rows import TensorTarget

if TYPE_CHECKING:
    from penstock._native import FileSeal


def seal_chunks(seal: FileSeal, memory: Any, offset: int) -> None:
    """Seals whole chunks in place: a contiguous tensor of bytes, at an offset of the file."""
    seal.seal(offset // CHUNK_BYTES, _target(memory))


def open_chunks(seal: FileSeal, memory: Any, offset: int) -> int | None:
    """Opens whole chunks in place: a contiguous tensor of bytes, at an offset of the file.

    Returns:
        The offset of the first chunk that does not open, which is zeros then; None if all did.
    """
    closed = seal.open(offset // CHUNK_BYTES, _target(memory))
    return None if closed is None else closed * CHUNK_BYTES


def tampered(path: str, name: str, offset: int) -> TamperedError:
    """Returns the error for bytes that are not sealed with the key of their file."""
    return TamperedError(
        f"{path}: the bytes of {name!r} from {offset} on are not what was sealed there, and their"
        " digest is right: somebody has changed them; find out who writes to the storage, and load"
        " a checkpoint that you trust",
        path=os.path.dirname(path),
        file=os.path.basename(path),
        offset=offset,
        tensor=name,
    )


def _target(memory: Any) -> TensorTarget:
    return TensorTarget(memory.data_ptr(), memory.numel(), memory)
