"""Opens sealed spans after each read, on threads of their own, ahead of their use."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from penstock.errors import CorruptCheckpointError, PenstockError
from penstock.io.own_io import another
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.io.data_file import AnyFile
    from penstock.io.files.extents import SealedChunks
    from penstock.io.files.file_marks import FileMark
    from penstock.io.tensor_io import TensorIO
    from penstock.io.transfer import Transfer, TransferReport
    from penstock.offload.streaming.weights.units import ReadSpan

_THREADS = 2
"""One opens a unit while the other waits for the read of the next one."""


class SealedRead:
    """A read of spans that ends when they are open: a `Transfer` for its caller.

    Attributes:
        is_seen: Whether somebody has seen its error, or needs not to.
    """

    def __init__(self, transfer: Transfer, opening: Future[None]) -> None:
        self._transfer = transfer
        self._opening = opening

    @property
    def is_seen(self) -> bool:
        """As of `Transfer`."""
        return self._transfer.is_seen

    @is_seen.setter
    def is_seen(self, is_seen: bool) -> None:
        self._transfer.is_seen = is_seen

    def done(self) -> bool:
        """Whether all spans are open, or something failed."""
        return self._opening.done()

    def cancel(self) -> None:
        """Cancels requests that have not started."""
        self._transfer.cancel()

    def result(self) -> TransferReport:
        """Waits until all spans are open.

        Raises:
            TransferError: Bytes could not be read.
            CorruptCheckpointError: Bytes are not those that were saved.
            TamperedError: A chunk is not the one that was sealed for its place.
        """
        # Nobody may use the memory before the thread has left it.
        wait([self._opening])
        error = self._opening.exception()
        if isinstance(error, PenstockError):
            # Kept errors would keep the frames of the thread, and with them the files.
            raise error.with_traceback(None)
        self._opening.result()
        return self._transfer.result()


class _Work:
    """Does work in order, on threads that end when there is none: a dropped model leaves none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._under_way: set[Future[None]] = set()
        self._threads = 0

    def begin(self, work: Callable[[], None]) -> Future[None]:
        """Queues work."""
        done: Future[None] = Future()
        with self._lock:
            self._waiting.append((done, work))
            self._under_way.add(done)
            is_short = self._threads < _THREADS
            self._threads += is_short
        if is_short:
            threading.Thread(target=self._run, name="penstock-open").start()
        return done

    def wait_ended(self) -> None:
        """Waits until all work has ended."""
        with self._lock:
            under_way = list(self._under_way)
        wait(under_way)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                done, work = self._waiting.popleft()
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            with self._lock:
                self._under_way.discard(done)
            # Work holds memory of its caller.
            del done, work


class SealedReader:
    """Reads spans of sealed files, and opens their chunks.

    Tags cover whole chunks, so the rest of the chunks in which a span begins and ends is read as
    well. Every read is opened, so bytes are never used that differ from those that were sealed.

    Attributes:
        read_bytes: Bytes read around the spans.
    """

    def __init__(self, chunks: SealedChunks, marks: Mapping[str, FileMark], io: TensorIO) -> None:
        self.read_bytes = 0
        self._chunks = chunks
        self._marks = marks
        self._io = io
        self._work = _Work()

    def begin(
        self, spans: Sequence[ReadSpan], memory: Any, file: Callable[[str], AnyFile]
    ) -> SealedRead:
        """Starts to read spans; ``file`` gives the file of a path."""
        pieces = [self._pieces_of(span, memory) for span in spans]
        transfer = self._read(self._io, spans, pieces, file)
        self.read_bytes += sum(before.numel() + behind.numel() for before, _, behind in pieces)
        opening = self._work.begin(lambda: self._open_all(transfer, spans, pieces))
        return SealedRead(transfer, opening)

    def wait_ended(self) -> None:
        """Waits until no thread uses memory of a caller."""
        self._work.wait_ended()

    def _open_all(
        self, transfer: Transfer, spans: Sequence[ReadSpan], pieces: Sequence[list[Any]]
    ) -> None:
        transfer.result()
        for span, each in zip(spans, pieces, strict=True):
            if not span.nbytes:
                continue
            begin, wanted = span.offset - each[0].numel(), (span.offset, span.offset + span.nbytes)
            try:
                self._chunks.open(span.path, begin, each, wanted)
            except CorruptCheckpointError:
                # Reads once more, past the page cache: it may be damage, of memory or device.
                with another(self._io, direct="auto") as past_cache:
                    self._read(past_cache, [span], [each], str).result()
                try:
                    self._chunks.check(span.path, begin, each, wanted)
                    self._chunks.open(span.path, begin, each, wanted)
                except BaseException:
                    for piece in each:
                        piece.zero_()
                    raise

    def _read(
        self,
        io: TensorIO,
        spans: Sequence[ReadSpan],
        pieces: Sequence[list[Any]],
        file: Callable[[str], AnyFile],
    ) -> Transfer:
        requests = []
        for span, each in zip(spans, pieces, strict=True):
            place = span.offset - each[0].numel()
            for piece in each:
                if piece.numel():
                    requests.append((piece, file(span.path), place))
                place += piece.numel()
        transfer = io.read_all(requests)
        # `result` raises its error, if it is called; without it nobody needs the bytes.
        transfer.is_seen = True
        return transfer

    def _pieces_of(self, span: ReadSpan, memory: Any) -> list[Any]:
        """Memory for the bytes before a span, the span, and the bytes behind it."""
        torch = dtypes.import_torch()
        chunk_bytes = self._chunks.chunk_bytes
        end = span.offset + span.nbytes
        begin = span.offset // chunk_bytes * chunk_bytes
        last = min(-(-end // chunk_bytes) * chunk_bytes, self._marks[span.path].nbytes)
        inside = memory[span.place : span.place + span.nbytes]
        if not span.nbytes:
            begin = last = end = span.offset
        return [
            torch.empty(span.offset - begin, dtype=torch.uint8, device="cpu"),
            inside,
            torch.empty(last - end, dtype=torch.uint8, device="cpu"),
        ]
