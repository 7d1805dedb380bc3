"""`CopyMemory`: copies pieces of host memory side by side into memory that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock import _native

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CopyMemory", "Piece"]

ALIGN_BYTES = 64
"""Copies begin at multiples of this, as tensors of PyTorch's allocator do."""


class Piece(NamedTuple):
    """A piece of memory to copy.

    Attributes:
        address: Address of its first byte.
        nbytes: Its size.
        owner: An object that keeps the memory alive.
    """

    address: int
    nbytes: int
    owner: object


class CopyMemory:
    """Memory into which pieces of other memory are copied, from call to call.

    It is one mapping in huge pages, as large as the most that was copied so far. The order is that
    of tensors in a shard: whole pages first, then multiples of 64 bytes, both without gaps. So a
    save that stores each copy as a tensor finds it at the same place in a page as in the file, and
    writes it from there.
    """

    def __init__(self) -> None:
        self.buffer: _native.HostBuffer | None = None

    def copy(self, pieces: Sequence[Piece], *, threads: int) -> list[int]:
        """Copies pieces, over the copies of the call before; returns their offsets in `buffer`.

        Raises:
            StorageError: The system has too little memory.
        """
        offsets = [0] * len(pieces)
        end = 0
        rows = []
        for index in _native.order_of_sizes([piece.nbytes for piece in pieces]):
            address, nbytes, owner = pieces[index]
            offsets[index] = end
            rows.append((end, address, nbytes, owner))
            end += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        if self.buffer is None or len(self.buffer) < end:
            # Released first, so that the old memory and the new are not held together.
            self.buffer = None
            self.buffer = _native.reserve(end, 0)
        _native.copy_side_by_side(rows, self.buffer, threads)
        return offsets

    def release(self) -> None:
        """Releases the memory once no tensor uses it."""
        self.buffer = None
