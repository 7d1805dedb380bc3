"""`ChunkPipeline`: streams state through memory by windows, read ahead and written behind."""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.common.tracing import span
from penstock.errors import PenstockError
from penstock.io.buffers import Buffers
from penstock.io.files.digests import chunk_digests, damaged, differing
from penstock.io.files.seals import open_chunks, seal_chunks, tampered
from penstock.io.tensor_io import TensorIO
from penstock.tensors import dtypes
from penstock.tensors.file_tensor import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.io.digested_file import DigestedFile, ReservedFile
    from penstock.io.transfer import Transfer
    from penstock.offload.optim.layout import StateSegment, Window

_WINDOW_BYTES_MAX = 16 << 20
_SLOTS = 6
"""Windows in memory at a time, if they fit: some are read, one is updated, some are written."""
SLOTS_MIN = 3
_PREPARED = 2
"""Windows that are prepared: one is worked on, and the next one."""

_Prepared = TypeVar("_Prepared")


@dataclass(eq=False)
class Task:
    """A segment to update.

    Attributes:
        segment: Its layout.
        sources: Its current files; None if it has none yet.
        targets: The files to write.
        chunks: Digests of the written files, filled during `ChunkPipeline.run`.
    """

    segment: StateSegment
    sources: Sequence[DigestedFile] | None
    targets: list[ReservedFile]
    chunks: list[list[int]]


@dataclass(eq=False)
class _WindowSlot:
    """Memory for one window.

    Attributes:
        memory: All of it.
        parts: The part of each moment.
        reading: The read that fills it; None if the segment has no files yet.
    """

    memory: Any
    parts: list[Any]
    reading: Transfer | None = None


class ChunkPipeline:
    """Streams segments through a bounded amount of memory."""

    def __init__(self, memory_bytes: int) -> None:
        self.reads = TensorIO()
        self.writes = TensorIO()
        self._memory_bytes = memory_bytes
        self._arena: Any = None
        # Each thread takes windows in order: one window is read and verified, the next one updated,
        # and the one before digested and written, at the same time.
        self._before = ThreadPoolExecutor(1, "penstock-read")
        self._behind = ThreadPoolExecutor(1, "penstock-write")

    def close(self) -> None:
        """Releases threads and memory; files that are still held can be read."""
        self._before.shutdown()
        self._behind.shutdown()
        self.writes.close()
        self._arena = None

    def run(
        self,
        tasks: list[Task],
        prepare: Callable[[Task, Window, list[Any]], _Prepared],
        work: Callable[[_Prepared], None],
    ) -> None:
        """Streams segments through memory; what is written is not yet synced.

        Args:
            tasks: The segments, in this order.
            prepare: Prepares a window, while its moments are read and windows before it are worked
                on; gets the bytes of each of its files, in their order.
            work: Changes the moments of a prepared window in place, once they are read.
        """
        windows, slots = self._cut(tasks)
        reads: deque[tuple[Task, Window, _WindowSlot, Future[None]]] = deque()
        prepared: deque[_Prepared] = deque()
        writes: deque[tuple[_WindowSlot, Future[Transfer]]] = deque()
        following = iter(windows)
        is_more = True
        try:
            while True:
                while writes and (_has_ended(writes[0][1]) or not (slots or reads)):
                    # It stays in `writes` until it has ended, even if an interrupt comes meanwhile.
                    slot, writing = writes[0]
                    writing.result().result()
                    slots.append(slot)
                    writes.popleft()
                while slots and is_more:
                    if (found := next(following, None)) is None:
                        is_more = False
                    else:
                        slot = slots.pop()
                        reads.append((*found, slot, self._begin(*found, slot)))
                if reads:
                    for task, window, slot, _ in islice(reads, len(prepared), _PREPARED):
                        prepared.append(prepare(task, window, slot.parts))
                    task, window, slot, verifying = reads[0]
                    with span("wait for read"):
                        verifying.result()
                    reads.popleft()
                    with span("update"):
                        work(prepared.popleft())
                    writes.append((slot, self._behind.submit(self._write, task, window, slot)))
                elif not writes:
                    return
        except BaseException:
            # The kernel may still write to the slots, or read from them.
            for *_, slot, verifying in reads:
                verifying.cancel()
                _wait(verifying)
                if slot.reading is not None:
                    slot.reading.cancel()
                    slot.reading.ends_within(None)
            for _, writing in writes:
                if (transfer := _wait(writing)) is not None:
                    transfer.ends_within(None)
            raise

    def _cut(self, tasks: list[Task]) -> tuple[list[tuple[Task, Window]], list[_WindowSlot]]:
        """The windows of all tasks, and slots of memory for some at a time."""
        torch = dtypes.import_torch()
        files = max(len(task.targets) for task in tasks)
        room = self._memory_bytes // (_SLOTS * files) // CHUNK_BYTES * CHUNK_BYTES
        for nbytes in (min(room, _WINDOW_BYTES_MAX), CHUNK_BYTES):
            size = max(nbytes, CHUNK_BYTES)
            found = [(task, window) for task in tasks for window in task.segment.windows(size)]
            slot_bytes = max(_bytes_in_memory(task.segment, window) for task, window in found)
            count = min(self._memory_bytes // slot_bytes, len(found))
            if self._memory_bytes // slot_bytes >= SLOTS_MIN:
                break
        else:
            raise ValueError(
                f"memory_bytes={self._memory_bytes}:"
                f" {smallest([task.segment for task in tasks])} is the least that works"
            )
        whole = count * slot_bytes
        if self._arena is None or self._arena.numel() < whole:
            self._arena = None
            # Threads without inference mode change it, too.
            with torch.inference_mode(False):
                self._arena = Buffers(whole + (2 << 20)).empty(whole, torch.uint8)
        return found, [
            _WindowSlot(self._arena[index * slot_bytes : (index + 1) * slot_bytes], [])
            for index in range(count)
        ]

    def _begin(self, task: Task, window: Window, slot: _WindowSlot) -> Future[None]:
        """Starts to read a window, and queues its verification."""
        nbytes = window.end - window.begin
        stride = _whole(nbytes)
        slot.parts = [
            slot.memory[index * stride : index * stride + nbytes]
            for index in range(len(task.targets))
        ]
        slot.reading = None
        if task.sources is not None:
            requests = [
                (part, source.path, window.begin)
                for part, source in zip(slot.parts, task.sources, strict=True)
            ]
            slot.reading = self.reads.read_all(requests)
            # `_finish` raises its error; without a caller nobody needs the window.
            slot.reading.is_seen = True
        return self._before.submit(self._finish, task, window, slot)

    def _finish(self, task: Task, window: Window, slot: _WindowSlot) -> None:
        """Waits for a window's state, verifies and opens it, and sets the header.

        New state is zeros.
        """
        torch = dtypes.import_torch()
        if slot.reading is None or task.sources is None:
            for part in slot.parts:
                part.zero_()
        else:
            slot.reading.result()
            first, last = window.begin // CHUNK_BYTES, -(-window.end // CHUNK_BYTES)
            for index, source in enumerate(task.sources):
                wanted = source.chunks[first:last]
                if differing(chunk_digests(slot.parts[index]), wanted):
                    self._read_again(task, window, index, slot.parts[index], wanted)
                if (seal := source.seal) is not None:
                    closed = open_chunks(seal, slot.parts[index], window.begin)
                    if closed is not None:
                        name = task.segment.name_at(index, closed)
                        raise tampered(source.path, name, closed)
        for part, header in zip(slot.parts, task.segment.headers, strict=True):
            if window.begin < len(header):
                text = header[window.begin : window.end]
                part[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def _read_again(
        self, task: Task, window: Window, index: int, part: Any, wanted: Sequence[int]
    ) -> None:
        """Reads a part again, as it may have been damaged in transit; raises if it differs."""
        path = task.sources[index].path if task.sources else ""
        self.reads.read(part, path, window.begin).result()
        if wrong := differing(chunk_digests(part), wanted):
            offset = window.begin + wrong[0] * CHUNK_BYTES
            raise damaged(path, task.segment.name_at(index, offset), offset)

    def _write(self, task: Task, window: Window, slot: _WindowSlot) -> Transfer:
        for chunks, part, room in zip(task.chunks, slot.parts, task.targets, strict=True):
            if room.seal is not None:
                # In place: the next window to come into this memory is read there.
                seal_chunks(room.seal, part, window.begin)
            chunks += chunk_digests(part)
        requests = [
            (part, room.path, window.begin)
            for part, room in zip(slot.parts, task.targets, strict=True)
        ]
        writing = self.writes.write_all(requests)
        writing.is_seen = True
        return writing


def _has_ended(writing: Future[Transfer]) -> bool:
    """Whether a window is written, or its write failed."""
    return writing.done() and (writing.exception() is not None or writing.result().done())


def _wait(one: Future[Any]) -> Any:
    """Waits for an operation's result; None if it failed or was cancelled."""
    with contextlib.suppress(CancelledError, PenstockError):
        return one.result()
    return None


def smallest(segments: Sequence[StateSegment]) -> int:
    """The least memory that works, in bytes."""
    return SLOTS_MIN * max(
        _bytes_in_memory(one, window) for one in segments for window in one.windows(CHUNK_BYTES)
    )


def _bytes_in_memory(segment: StateSegment, window: Window) -> int:
    return len(segment.moments) * _whole(window.end - window.begin)


def _whole(nbytes: int) -> int:
    """Rounds up to whole chunks, so that the next part begins at a page."""
    return -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES
