"""`TableFile`: a shard of rows, written past the page cache and digested meanwhile."""

from __future__ import annotations

import json
import os
import queue
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import _native
from penstock.errors import StorageError, storage_errors
from penstock.features.sources.table_metadata import BLOCK_BYTES, TAG_BYTES
from penstock.io.arrays import to_write_from
from penstock.io.buffers import Buffers
from penstock.io.digested_file import sync
from penstock.io.files.digests import combined
from penstock.tensors.dtypes import header_entry
from penstock.tensors.file_tensor import CHUNK_BYTES
from penstock.tensors.native_rows import TensorSource, TensorTarget

if TYPE_CHECKING:
    from typing import TypeAlias

    from penstock.io.tensor_io import TensorIO
    from penstock.io.transfer import TransferReport
    from penstock.reports import Fallback

    _Written: TypeAlias = tuple[list[int], bytes, TransferReport]

_PIECE_BYTES = 16 << 20
_PIECES = 4
"""One piece is filled while the others are digested and written."""
_LENGTH_BYTES = 8
_METADATA = {"format": "pt", "penstock": "1"}
_COUNT_MAX = (1 << 63) - 1


class TableFile:
    """A safetensors file with one tensor, whose rows are appended.

    Room is left for the header, which is written once the number of rows is known.

    Args:
        path: The file to create.
        io: Writes it.
        label: Name of the tensor in the header.
        dtype: Its element type, as in `docs/format.md`; safetensors has a name for it.
        dims: The number of its dimensions.
        nbytes: Bytes of all rows, whose space is then reserved; None if unknown.
        is_sealed: Whether blocks are sealed before they are digested and written.

    Attributes:
        path: The file.
        begin: Where the rows begin in it, in bytes: a multiple of a block.
        nbytes: Bytes of the file so far.
        is_direct: Whether the page cache is bypassed.
        chunks: CRC-64/NVME of each `CHUNK_BYTES` of the file, once it is finished.
        sealer: Seals the blocks; None if they stay clear.
    """

    def __init__(
        self,
        path: str,
        io: TensorIO,
        label: str,
        dtype: str,
        dims: int,
        nbytes: int | None,
        *,
        is_sealed: bool = False,
    ) -> None:
        self.path = path
        self.chunks: list[int] = []
        self._label = label
        self._dtype = dtype
        # Room for the longest header: that of the largest number of rows and bytes.
        self.begin = _LENGTH_BYTES
        longest = len(self._header((_COUNT_MAX,) * dims, _COUNT_MAX))
        self.begin = -(-longest // BLOCK_BYTES) * BLOCK_BYTES
        self.nbytes = self.begin
        self.sealer = _native.BlockSealer(self.begin, BLOCK_BYTES) if is_sealed else None
        self._reserve(nbytes)
        self._io = io
        self._file = io.open(path, "w")
        self.is_direct = self._file.is_direct
        self._free: queue.SimpleQueue[np.ndarray[Any, Any]] = queue.SimpleQueue()
        buffers = Buffers(_PIECES * _PIECE_BYTES)
        for _ in range(_PIECES):
            self._free.put(buffers.empty(_PIECE_BYTES, np.uint8))
        self._threads = ThreadPoolExecutor(_PIECES - 1, thread_name_prefix="penstock-rows")
        self._under_way: deque[Future[_Written]] = deque()
        self._piece: np.ndarray[Any, Any] | None = None
        self._start = self.begin
        self._filled = 0
        self._checks = bytearray()
        self._fallbacks: dict[Fallback, None] = {}

    def append(self, part: np.ndarray[Any, Any]) -> None:
        """Appends bytes of rows, which are copied."""
        at = 0
        while at < part.size:
            if self._piece is None:
                self._piece = self._free.get()
            room = _PIECE_BYTES - self._start % _PIECE_BYTES - self._filled
            count = min(room, part.size - at)
            self._piece[self._filled : self._filled + count] = part[at : at + count]
            self._filled += count
            at += count
            if count == room:
                self._pass_on()

    def finish(self, shape: tuple[int, ...]) -> None:
        """Waits for all writes, writes the header, and makes the file durable."""
        self._pass_on()
        while self._under_way:
            self._take(self._under_way.popleft())
        if self.sealer is not None:
            # The header of a sealed file names bytes alone.
            shape = (self.nbytes - self.begin,)
        header = np.frombuffer(self._header(shape, self.nbytes - self.begin), np.uint8)
        (digest,) = _digests(header, [(0, header.size)])
        if self.chunks:
            rest = min(self.nbytes, CHUNK_BYTES) - self.begin
            digest = combined(digest, self.chunks[0], rest)
        self.chunks[:1] = [digest]
        self._io.write(header, self._file, 0).result()
        sync(self.path)

    def close(self) -> None:
        """Waits for writes in flight, and closes the file."""
        self._threads.shutdown(cancel_futures=True)
        self._under_way.clear()
        self._file.close()

    @property
    def checks(self) -> np.ndarray[Any, Any]:
        """CRC-32C of each block of the rows, or its tag, once the file is finished."""
        if self.sealer is not None:
            return np.frombuffer(self._checks, np.uint8).reshape(-1, TAG_BYTES)
        return np.frombuffer(self._checks, np.uint32)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Faster ways that could not be used, each with its reason."""
        return tuple(self._fallbacks)

    def _pass_on(self) -> None:
        """Hands the filled piece to a thread that digests and writes it."""
        while self._under_way and self._under_way[0].done():
            self._take(self._under_way.popleft())
        piece, self._piece = self._piece, None
        if piece is None:
            return
        start, filled = self._start, self._filled
        self._start, self._filled = start + filled, 0
        self.nbytes += filled
        self._under_way.append(self._threads.submit(self._write, piece, start, filled))

    def _write(self, piece: np.ndarray[Any, Any], start: int, count: int) -> _Written:
        try:
            bytes_of = piece[:count]
            tags = None
            if self.sealer is not None:
                # Pieces begin with a block.
                memory = TensorTarget(bytes_of.ctypes.data, count, bytes_of)
                tags = self.sealer.seal((start - self.begin) // BLOCK_BYTES, memory)
            transfer = self._io.write(bytes_of, self._file, start)
            end = start + count
            borders = range((start // CHUNK_BYTES + 1) * CHUNK_BYTES, end, CHUNK_BYTES)
            cuts = [place - start for place in (start, *borders, end)]
            digests = _digests(bytes_of, list(pairwise(cuts)))
            checks = _native.block_checks(to_write_from(bytes_of)) if tags is None else tags
            return digests, checks, transfer.result()
        finally:
            self._free.put(piece)

    def _take(self, written: Future[_Written]) -> None:
        try:
            digests, checks, report = written.result()
        except StorageError as error:
            # A traceback's frames would keep the file open, and its space taken, while somebody
            # keeps it.
            raise error.with_traceback(None) from None
        self.chunks += digests
        self._checks += checks
        self._fallbacks.update(dict.fromkeys(report.fallbacks))

    def _header(self, shape: tuple[int, ...], nbytes: int) -> bytes:
        entry = header_entry(self._dtype, shape)
        assert entry is not None, "a table has rows, and a type that safetensors has a name for"
        kind, sizes = entry
        tensor = {"dtype": kind, "shape": sizes, "data_offsets": (0, nbytes)}
        described = {"__metadata__": _METADATA, self._label: tensor}
        text = json.dumps(described, separators=(",", ":")).encode()
        length = max(self.begin - _LENGTH_BYTES, len(text))
        return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)

    def _reserve(self, nbytes: int | None) -> None:
        with storage_errors("make", self.path), open(self.path, "xb") as file:
            if nbytes is not None:
                os.posix_fallocate(file.fileno(), 0, self.begin + nbytes)


def _digests(memory: np.ndarray[Any, Any], ranges: list[tuple[int, int]]) -> list[int]:
    """CRC-64/NVME of ranges of bytes."""
    address = memory.ctypes.data
    places = [((end - begin,), address + begin, None, 1) for begin, end in ranges]
    return _native.digests(
        [TensorSource("rows", "uint8", *place, memory, None, None) for place in places]
    )
