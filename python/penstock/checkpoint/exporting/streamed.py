"""`Stream`: reads, converts and writes tensors block by block.

The layout of all files is known before anything is read. While one block is written, the next ones
are therefore read into reused memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checkpoint.loading.opened import BoxRead
from penstock.errors import storage_errors
from penstock.io.buffers import Buffers
from penstock.io.tensor_io import TensorIO
from penstock.tensors import dtypes
from penstock.tensors.memory import of_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from penstock.checkpoint.exporting.chosen import Weight
    from penstock.checkpoint.loading.opened import OpenCheckpoint
    from penstock.common.progress import Progress
    from penstock.io.transfer import Transfer
    from penstock.options import Options

PAGE_BYTES = 4096
SLOTS = 3
"""One buffer that is read into, and others that are written meanwhile."""
SLOT_BYTES_MAX = 16 << 20
"""Larger buffers cost more time, as their pages are new, than uninterrupted reads save."""


class TensorLocation(NamedTuple):
    """The place of a tensor in a file."""

    weight: Weight
    kind: torch.dtype
    offset: int


class File(NamedTuple):
    """A file to write.

    Attributes:
        header: Its header.
        places: Its tensors, in order.
        nbytes: Its size.
    """

    header: bytes
    places: list[TensorLocation]
    nbytes: int


class ReadBlock(NamedTuple):
    """A block of a tensor that is read at a time: rows, or all of it.

    Attributes:
        place: The place of the tensor.
        start: Index of its first element in the stored tensor.
        sizes: Its sizes in the stored tensor.
        at: Number of the tensor's elements before it.
        nbytes: Its stored size in bytes.
    """

    place: TensorLocation
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    nbytes: int


def takes(weights: Sequence[Weight]) -> bool:
    """Whether safetensors files support all types."""
    return all(dtypes.header_entry(weight.dtype, weight.shape) for weight in weights)


def plan(
    weights: Sequence[Weight], cast: Callable[[str], torch.dtype], shard_bytes: int
) -> list[File]:
    """Distributes tensors over files of a given size; larger tensors get files of their own."""
    files: list[File] = []
    chosen: list[tuple[Weight, torch.dtype]] = []
    size = 0
    for weight in weights:
        kind = cast(weight.dtype)
        nbytes = math.prod(weight.shape) * kind.itemsize
        if chosen and size + nbytes > shard_bytes:
            files.append(_file(chosen))
            chosen, size = [], 0
        chosen.append((weight, kind))
        size += nbytes
    files.append(_file(chosen))
    return files


def _file(chosen: list[tuple[Weight, torch.dtype]]) -> File:
    """Lays out one file: page-sized tensors first, so that almost all tensors start on a page."""

    def order(one: tuple[Weight, torch.dtype]) -> tuple[bool, int]:
        nbytes = math.prod(one[0].shape) * one[1].itemsize
        return (nbytes % PAGE_BYTES != 0, -one[1].itemsize)

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    begins = []
    for weight, kind in sorted(chosen, key=order):
        end = at + math.prod(weight.shape) * kind.itemsize
        described = dtypes.header_entry(str(kind).removeprefix("torch."), weight.shape)
        assert described is not None, "weights of other types are refused before"
        header[weight.name] = {
            "dtype": described[0],
            "shape": list(described[1]),
            "data_offsets": [at, end],
        }
        begins.append((weight, kind, at))
        at = end
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    whole = len(text).to_bytes(8, "little") + text
    places = [TensorLocation(weight, kind, len(whole) + begin) for weight, kind, begin in begins]
    return File(whole, places, len(whole) + at)


class Stream:
    """Writes files from a checkpoint.

    Args:
        checkpoint: The checkpoint.
        settings: How bytes are read, in the native module's form.
        options: How bytes are written.
        memory_bytes: Memory for data being moved; more if a row of a tensor needs it.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        settings: dict[str, Any],
        options: Options,
        memory_bytes: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._settings = settings
        self._options = options
        self._memory_bytes = memory_bytes
        self._slot_bytes = PAGE_BYTES

    def run(self, files: list[File], paths: list[str], update: Progress | None) -> None:
        """Writes files; the caller makes them durable together with their directory."""
        import torch

        places = [place for file in files for place in file.places]
        total_bytes = sum(place.weight.nbytes for place in places)
        # Converted tensors need additional memory.
        grown = max(
            place.kind.itemsize / place.weight.kind.itemsize
            if place.kind != place.weight.kind
            else 0.0
            for place in places
        )
        each_bytes = int(self._memory_bytes / (SLOTS * (1 + grown)))
        self._slot_bytes = max(min(each_bytes, SLOT_BYTES_MAX), PAGE_BYTES)
        done_bytes = 0
        # In huge pages: scattered pages halve the throughput of devices that take them one by one.
        buffers = Buffers(sys.maxsize)
        memory = [torch.empty(0, dtype=torch.uint8, device="cpu")] * SLOTS
        written: list[tuple[Transfer, Any] | None] = [None] * SLOTS
        number = 0
        with TensorIO(engine=self._options.engine, direct=self._options.direct) as io:
            for file, path in zip(files, paths, strict=True):
                _reserve(path, file.nbytes)
                header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
                with io.open(path, "w") as opened:
                    begun = io.write(header, opened)
                    for pieces in self._batches(file):
                        slot = number % SLOTS
                        number += 1
                        pending = written[slot]
                        if pending is not None:
                            pending[0].result()
                        need = sum(_aligned(piece.nbytes) for piece in pieces)
                        if memory[slot].numel() < need:
                            memory[slot] = buffers.empty(max(need, self._slot_bytes), torch.uint8)
                        tensors = self._read(pieces, memory[slot])
                        requests = [
                            (tensor, opened, _offset(piece))
                            for tensor, piece in zip(tensors, pieces, strict=True)
                        ]
                        written[slot] = (io.write_all(requests), tensors)
                        done_bytes += sum(piece.nbytes for piece in pieces)
                        if update is not None:
                            update(done_bytes, total_bytes)
                    begun.result()
            for pending in written:
                if pending is not None:
                    pending[0].result()

    def _batches(self, file: File) -> Iterator[list[ReadBlock]]:
        batch: list[ReadBlock] = []
        size = 0
        for place in file.places:
            for piece in self._pieces(place):
                if batch and size + _aligned(piece.nbytes) > self._slot_bytes:
                    yield batch
                    batch, size = [], 0
                batch.append(piece)
                size += _aligned(piece.nbytes)
        if batch:
            yield batch

    def _pieces(self, place: TensorLocation) -> Iterator[ReadBlock]:
        weight = place.weight
        sizes = weight.sizes
        # Leading dimensions of size one, such as a single expert, come before the rows.
        axis = next((axis for axis, size in enumerate(sizes) if size > 1), None)
        if weight.is_window or axis is None or weight.nbytes <= self._slot_bytes:
            yield ReadBlock(place, weight.start, sizes, 0, weight.nbytes)
            return
        row_items = math.prod(sizes[axis + 1 :])
        row_bytes = row_items * weight.kind.itemsize
        rows = max(self._slot_bytes // row_bytes, 1)
        for row in range(0, sizes[axis], rows):
            count = min(rows, sizes[axis] - row)
            yield ReadBlock(
                place,
                (*weight.start[:axis], weight.start[axis] + row, *weight.start[axis + 1 :]),
                (*sizes[:axis], count, *sizes[axis + 1 :]),
                row * row_items,
                count * row_bytes,
            )

    def _read(self, pieces: list[ReadBlock], memory: torch.Tensor) -> list[torch.Tensor]:
        """Reads and verifies blocks, and converts them."""
        boxes: list[BoxRead] = []
        found: list[torch.Tensor | None] = []
        at = 0
        with self._checkpoint.reading():
            for piece in pieces:
                weight = piece.place.weight
                if weight.is_window:
                    found.append(None)
                    continue
                flat = memory[at : at + piece.nbytes].view(weight.kind)
                tensor = flat.view(piece.sizes)
                boxes.append(BoxRead(weight.stored, piece.start, of_tensor(tensor, weight.name)))
                found.append(tensor)
                at += _aligned(piece.nbytes)
            self._checkpoint.read(boxes, self._settings)
            windows = [piece.place.weight.node for piece in pieces if piece.place.weight.is_window]
            values = self._checkpoint.values(windows, self._settings) if windows else iter(())
            return [
                _as(next(values) if tensor is None else tensor, piece.place.kind)
                for tensor, piece in zip(found, pieces, strict=True)
            ]


def _as(value: Any, kind: torch.dtype) -> torch.Tensor:
    import torch

    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
    return tensor.to(kind).contiguous()


def _offset(piece: ReadBlock) -> int:
    """Returns the offset of a block in its file."""
    return piece.place.offset + piece.at * piece.place.kind.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _reserve(path: str, nbytes: int) -> None:
    """Creates a file of a given size, with reserved space."""
    with storage_errors("make room for", path, ": make room, and export again"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
                os.ftruncate(fd, nbytes)
        finally:
            os.close(fd)
