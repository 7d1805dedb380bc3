"""What is read for the first time is compared with its digests before anybody computes with it."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from penstock.errors import CorruptCheckpointError
from penstock.state import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.offload.streaming.stored import Digests, FileMark
    from penstock.offload.streaming.units import Span
    from penstock.offload.tensor_io import TensorIO

_SPANS_MAX = 8
"""So many are looked at together: what lies around each takes two chunks of memory."""


class FirstReads:
    """Compares spans with the digests of the chunks that they lie in.

    Chunks do not end where tensors do: what lies around a span in its chunks is read beside it.

    Args:
        digests: Of the files.
        marks: How long each file is, by its path.
        io: Reads; it has a share of the device of its own, so that nothing here waits for all that
            is read ahead.

    Attributes:
        read_bytes: That were asked of storage.
    """

    def __init__(self, digests: Digests, marks: Mapping[str, FileMark], io: TensorIO) -> None:
        self.read_bytes = 0
        self._digests = digests
        self._marks = marks
        self._io = io
        self._good: set[tuple[str, int, int]] = set()
        self._lock = threading.Lock()

    def check(self, spans: Iterable[Span], memory: Any) -> None:
        """Compares what was read, unless it was right before.

        Args:
            spans: Of files.
            memory: That holds them, where they say.

        Raises:
            CorruptCheckpointError: Bytes are not what was stored, when read once more, too.
            TransferError: What lies around them cannot be read.
        """
        with self._lock:
            new = [span for span in spans if span[:3] not in self._good]
            for begin in range(0, len(new), _SPANS_MAX):
                self._check(new[begin : begin + _SPANS_MAX], memory)

    def _check(self, spans: list[Span], memory: Any) -> None:
        around = [self._around(span) for span in spans]
        requests = [
            (piece, span.path, offset)
            for span, pieces in zip(spans, around, strict=True)
            for piece, offset in pieces
        ]
        self._read(self._io, requests)
        for span, pieces in zip(spans, around, strict=True):
            inside = memory[span.place : span.place + span.nbytes]
            try:
                self._compare(span, pieces, inside)
            except CorruptCheckpointError:
                # The device may have other bytes than those that the page cache holds.
                again = [(piece, span.path, offset) for piece, offset in pieces]
                _drop_cache(span.path)
                with self._io._another(direct="auto") as past_cache:
                    self._read(past_cache, [*again, (inside, span.path, span.offset)])
                self._compare(span, pieces, inside)
            self._good.add(span[:3])

    def _read(self, io: TensorIO, requests: list[tuple[Any, str, int]]) -> None:
        if requests := [one for one in requests if one[0].numel()]:
            self.read_bytes += sum(piece.numel() for piece, _, _ in requests)
            io.read_all(requests).result()

    def _around(self, span: Span) -> list[tuple[Any, int]]:
        """Memory for what lies before a span and behind it, and where in the file that begins."""
        torch = dtypes.import_torch()
        chunk_bytes = self._digests.chunk_bytes
        end = span.offset + span.nbytes
        begin = span.offset // chunk_bytes * chunk_bytes
        last = min(-(-end // chunk_bytes) * chunk_bytes, self._marks[span.path].nbytes)
        return [
            (torch.empty(span.offset - begin, dtype=torch.uint8), begin),
            (torch.empty(last - end, dtype=torch.uint8), end),
        ]

    def _compare(self, span: Span, pieces: list[tuple[Any, int]], inside: Any) -> None:
        (before, begin), (behind, end) = pieces
        self._digests.check(span.path, begin, [before, inside, behind], (span.offset, end))


def _drop_cache(path: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
