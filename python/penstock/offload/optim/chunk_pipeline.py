"""`Passage`: the state passes through memory, a window at a time, read ahead and written behind."""

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
from penstock.io.digests import chunk_digests, damaged, differing
from penstock.io.tensor_io import TensorIO
from penstock.tensors import dtypes
from penstock.tensors.file_tensor import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from penstock.io.digested_file import ReservedFile
    from penstock.io.transfer import Transfer
    from penstock.offload.optim.layout import Segment, Window
    from penstock.tensors.file_tensor import HeldFile

_WINDOW_BYTES_MAX = 16 << 20
_SLOTS = 6
"""Windows in memory at a time, if there is room: some are read, one is worked on, some written."""
SLOTS_MIN = 3
_PREPARED = 2
"""So many windows are made ready: the next one while one is worked on."""

_Prepared = TypeVar("_Prepared")


@dataclass(eq=False)
class Task:
    """A segment that passes.

    Attributes:
        segment: Its layout.
        sources: Its files; None where it had none yet.
        targets: The files that it is written to.
        chunks: The digests of those, once it has passed.
    """

    segment: Segment
    sources: Sequence[HeldFile] | None
    targets: list[ReservedFile]
    chunks: list[list[int]]


@dataclass(eq=False)
class _Slot:
    """Memory for one window.

    Attributes:
        memory: All of it.
        parts: That of each moment of a window.
        reading: What fills it; None where there is nothing to read.
    """

    memory: Any
    parts: list[Any]
    reading: Transfer | None = None


class Passage:
    """Has segments pass through a bounded amount of memory.

    Args:
        memory_bytes: How much.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.reads = TensorIO()
        self.writes = TensorIO()
        self._memory_bytes = memory_bytes
        self._arena: Any = None
        # Each in the order of the windows: one is read and compared, the next one updated, and the
        # one before digested and written, at the same time.
        self._before = ThreadPoolExecutor(1, "penstock-read")
        self._behind = ThreadPoolExecutor(1, "penstock-write")

    def close(self) -> None:
        """Lets threads and memory go; files that somebody holds can still be read."""
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
        """Has segments pass; what was written is not yet synced.

        Args:
            tasks: What passes, in this order.
            prepare: Makes a window ready for the work, while its moments come and others before it
                are worked on; the tensors of bytes are for those of the files in their order.
            work: Changes the moments of a window in place, once they are there.

        Raises:
            ValueError: There is too little memory.
            TransferError: Something cannot be read or written.
            CorruptCheckpointError: What was read is not what was written.
        """
        windows, slots = self._cut(tasks)
        reads: deque[tuple[Task, Window, _Slot, Future[None]]] = deque()
        prepared: deque[_Prepared] = deque()
        writes: deque[tuple[_Slot, Future[Transfer]]] = deque()
        following = iter(windows)
        is_more = True
        try:
            while True:
                while writes and (_has_ended(writes[0][1]) or not (slots or reads)):
                    # It stays among them until it has ended, however this is interrupted.
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

    def _cut(self, tasks: list[Task]) -> tuple[list[tuple[Task, Window]], list[_Slot]]:
        """The windows of all, and memory for some at a time.

        Raises:
            ValueError: There is too little memory.
        """
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
            # Threads change it too, which have no inference mode.
            with torch.inference_mode(False):
                self._arena = Buffers(whole + (2 << 20)).empty(whole, torch.uint8)
        return found, [
            _Slot(self._arena[index * slot_bytes : (index + 1) * slot_bytes], [])
            for index in range(count)
        ]

    def _begin(self, task: Task, window: Window, slot: _Slot) -> Future[None]:
        """Begins to read a window, and to compare it with its digests."""
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
            # Whoever waits for the window hears what went wrong; perhaps nobody does.
            slot.reading.is_seen = True
        return self._before.submit(self._finish, task, window, slot)

    def _finish(self, task: Task, window: Window, slot: _Slot) -> None:
        """Has the state of a window there."""
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
        for part, header in zip(slot.parts, task.segment.headers, strict=True):
            if window.begin < len(header):
                text = header[window.begin : window.end]
                part[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def _read_again(
        self, task: Task, window: Window, index: int, part: Any, wanted: Sequence[int]
    ) -> None:
        """What differs may have been damaged on its way."""
        path = task.sources[index].path if task.sources else ""
        self.reads.read(part, path, window.begin).result()
        if wrong := differing(chunk_digests(part), wanted):
            offset = window.begin + wrong[0] * CHUNK_BYTES
            raise damaged(path, task.segment.name_at(index, offset), offset)

    def _write(self, task: Task, window: Window, slot: _Slot) -> Transfer:
        for chunks, part in zip(task.chunks, slot.parts, strict=True):
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
    """Waits for what is under way; None where it failed or was given up."""
    with contextlib.suppress(CancelledError, PenstockError):
        return one.result()
    return None


def smallest(segments: Sequence[Segment]) -> int:
    """The least memory that works, in bytes."""
    return SLOTS_MIN * max(
        _bytes_in_memory(one, window) for one in segments for window in one.windows(CHUNK_BYTES)
    )


def _bytes_in_memory(segment: Segment, window: Window) -> int:
    return len(segment.moments) * _whole(window.end - window.begin)


def _whole(nbytes: int) -> int:
    """In whole chunks, so that what follows begins at a page."""
    return -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES
