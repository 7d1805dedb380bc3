"""`DigestedFile`: a file of tensors with a digest of each chunk, checked by every read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.errors import storage_errors
from penstock.io.files.digests import chunk_digests, damaged, differing
from penstock.io.files.seals import open_chunks, tampered
from penstock.tensors.copying import byte_view
from penstock.tensors.file_tensor import CHUNK_BYTES, FileTensor, HeldFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._native import FileSeal
    from penstock.io.tensor_io import TensorIO
    from penstock.tensors.file_tensor import FileTarget

_READ_BYTES = 16 << 20


class ReservedFile:
    """A file with reserved space; its owner writes it once, and this object's end removes it.

    Attributes:
        path: The path of the file.
        nbytes: Its size.
        seal: The key of this writing of the file; None to write it in the clear.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.seal: FileSeal | None = None


class DigestedFile(HeldFile):
    """A complete file of tensors on stable storage.

    ``target`` returns the place where a load stores a replacement for one of its tensors.

    Attributes:
        seal: The key of the file; None if it is clear.
    """

    def __init__(
        self,
        room: ReservedFile,
        chunks: Sequence[int],
        io: TensorIO,
        target: Callable[[FileTensor], FileTarget],
    ) -> None:
        self._room = room
        self.path = room.path
        self.nbytes = room.nbytes
        self.chunks = chunks
        self.sealer = self.seal = room.seal
        self._io = io
        self._target = target
        self._last: tuple[int, int, Any] = (0, 0, None)

    def read(self, memory: Any, offset: int) -> None:
        """Fills a contiguous tensor from the file, and checks the digests of the bytes and tags."""
        if not memory.numel():
            return
        flat = byte_view(memory)
        end = offset + flat.numel()
        first = offset // CHUNK_BYTES * CHUNK_BYTES
        while first < end:
            last = min(first + _READ_BYTES, self.nbytes, -(-end // CHUNK_BYTES) * CHUNK_BYTES)
            content = self._content(first, last)
            low, high = max(first, offset), min(last, end)
            flat[low - offset : high - offset] = content[low - first : high - first]
            first = last

    def _content(self, first: int, last: int) -> Any:
        """Reads whole chunks, checks their digests, and opens them if they are sealed."""
        import torch

        # A chunk holds many small tensors, which are mostly read in order.
        begin, end, content = self._last
        if (begin, end) == (first, last):
            return content
        content = torch.empty(last - first, dtype=torch.uint8, device="cpu")
        self._io.read(content, self.path, first).result()
        wanted = self.chunks[first // CHUNK_BYTES : -(-last // CHUNK_BYTES)]
        if wrong := differing(chunk_digests(content), wanted):
            begin = first + wrong[0] * CHUNK_BYTES
            raise damaged(self.path, os.path.basename(self.path), begin)
        if self.seal is not None:
            closed = open_chunks(self.seal, content, first)
            if closed is not None:
                raise tampered(self.path, os.path.basename(self.path), closed)
        if last - first <= CHUNK_BYTES:
            self._last = (first, last, content)
        return content

    def target(self, tensor: FileTensor) -> FileTarget:
        """Returns the place where a load stores a replacement for one of the file's tensors."""
        return self._target(tensor)


def sync(path: str) -> None:
    """Makes the bytes written to a file survive a power cut."""
    with storage_errors("sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
