"""Write patterns of libraries that are not installed: the requests are theirs, the code is ours.

A library's other work (copies from a GPU, formats, metadata) is left out, so that the result is the
best that its pattern can reach. A file holds the tensors of a rank one after the other.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock_bench.peers.checkpoint.base import Detail, Writer
from penstock_bench.workloads.content import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    import torch

_MIB = 1 << 20
_PAGE_BYTES = 4096
_WRITE_BYTES_MAX = 1 << 30
"""Of one system call, which ends at 2 GiB."""


class _Emulated(Writer):
    """Tensors one after the other in a file of each rank."""

    is_flat = True
    fills = True
    suffix = ".bin"


class DataStates(_Emulated):
    """DataStates-LLM: one flush thread; open, seek, write, close for each tensor; buffered."""

    def save(self, directory: Path, state: Any) -> Detail:
        """Queues every tensor and waits for the thread."""
        path = self.path(directory)
        path.touch()
        with ThreadPoolExecutor(1) as flush:
            pending = [
                flush.submit(_write_one, path, offset, data) for offset, data in _placed(state)
            ]
        for one in pending:
            one.result()
        return {"direct_io": False, "metadata": {"open": len(pending) + 1}}

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, Detail]:
        """Open, seek, read, close for each tensor."""
        for offset, data in _placed(targets):
            with self.path(directory).open("rb", buffering=0) as file:
                file.seek(offset)
                _read_into(file, data)
        return targets, {"direct_io": False, "metadata": {"open": len(targets)}}


class FastPersist(_Emulated):
    """DeepSpeed FastPersist: O_DIRECT, two buffers of 64 MiB, requests of 1 MiB, eight in flight.

    Eight threads with a request each stand for libaio's queue.
    """

    buffer_bytes = 64 * _MIB
    request_bytes = _MIB
    depth = 8

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(rank, ranks)
        # Kept from save to save, as DeepSpeed keeps them, and in place before the first one.
        self._buffers = [mmap.mmap(-1, self.buffer_bytes) for _ in range(2)]
        for buffer in self._buffers:
            np.frombuffer(buffer, np.uint8).fill(0)

    def save(self, directory: Path, state: Any) -> Detail:
        """Fills one buffer while the other one is written; the tail is padded and cut."""
        descriptor, fallback = _open_direct(self.path(directory))
        buffers = self._buffers
        pending: list[list[Future[None]]] = [[], []]
        total = requests = 0
        try:
            with ThreadPoolExecutor(self.depth) as queue:
                for number, length in enumerate(_filling(state, buffers, pending)):
                    view = memoryview(buffers[number % 2])
                    padded = -(-length // _PAGE_BYTES) * _PAGE_BYTES
                    starts = range(0, padded, self.request_bytes)
                    pending[number % 2] = [
                        queue.submit(
                            _write_all,
                            descriptor,
                            view[start : min(start + self.request_bytes, padded)],
                            total + start,
                        )
                        for start in starts
                    ]
                    requests += len(starts)
                    total += length
            _finish(pending)
            os.ftruncate(descriptor, total)
        finally:
            os.close(descriptor)
        return {
            "direct_io": fallback is None,
            "fallbacks": [fallback] if fallback else [],
            "requests": requests,
            "metadata": {"open": 1, "truncate": 1},
        }

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, Detail]:
        """Buffered and in order, as `torch.load` reads what FastPersist wrote."""
        with self.path(directory).open("rb", buffering=0) as file:
            for _, data in _placed(targets):
                _read_into(file, data)
        return targets, {"direct_io": False, "metadata": {"open": 1}}


def _placed(state: dict[str, torch.Tensor]) -> Iterator[tuple[int, memoryview]]:
    """The bytes of each tensor, with the offset that it has in the file."""
    offset = 0
    for tensor in state.values():
        data = bytes_of(tensor).numpy().data
        yield offset, data
        offset += len(data)


def _filling(
    state: dict[str, torch.Tensor], buffers: list[mmap.mmap], pending: list[list[Future[None]]]
) -> Iterator[int]:
    """Copies all tensors into two buffers in turn; yields how many bytes each time are in one.

    The caller puts into ``pending`` the requests that a buffer waits for before it is refilled.
    """
    views = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    number = filled = 0
    for _, data in _placed(state):
        taken = 0
        while taken < len(data):
            length = min(len(data) - taken, len(buffers[0]) - filled)
            np.copyto(views[number % 2][filled : filled + length], data[taken : taken + length])
            taken += length
            filled += length
            if filled == len(buffers[0]):
                yield filled
                number, filled = number + 1, 0
                _finish([pending[number % 2]])
    if filled:
        yield filled


def _finish(pending: list[list[Future[None]]]) -> None:
    for some in pending:
        for one in some:
            one.result()


def _open_direct(path: Path) -> tuple[int, str | None]:
    """A new file past the page cache, or through it with the reason."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666), "the file system has no direct I/O: buffered"


def _write_one(path: Path, offset: int, data: memoryview) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        while data:
            data = data[file.write(data[:_WRITE_BYTES_MAX]) or 0 :]


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _read_into(file: Any, data: memoryview) -> None:
    while data:
        read = file.readinto(data[:_WRITE_BYTES_MAX])
        if not read:
            raise EOFError(f"{file.name} ends early")
        data = data[read:]
