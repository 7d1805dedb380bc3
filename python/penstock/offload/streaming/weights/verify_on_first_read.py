"""Compares the first read of each file range with its digests, before anything uses the bytes.

Where bytes are signed every read is compared: whoever writes to the storage can exchange a file
that was right before.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import CorruptCheckpointError
from penstock.io.own_io import another
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.io.files.extents import Digests
    from penstock.io.files.file_marks import FileMark
    from penstock.io.tensor_io import TensorIO
    from penstock.io.transfer import Transfer
    from penstock.offload.streaming.weights.units import ReadSpan

_SPANS_MAX = 8
"""Spans verified together: the surrounding bytes of each take up to two chunks of memory."""


class SurroundingBytes(NamedTuple):
    """The surrounding bytes of spans: the rest of the chunks in which they begin and end.

    Attributes:
        spans: Spans read for the first time.
        pieces: For each, memory for the bytes before it and behind it, with their file offsets.
        transfer: The read of these bytes.
    """

    spans: list[ReadSpan]
    pieces: list[list[tuple[Any, int]]]
    transfer: Transfer


class FirstReadVerifier:
    """Compares spans with the digests of their chunks.

    Chunks do not end where tensors do, so the surrounding bytes of a span are read as well.
    """

    def __init__(self, digests: Digests, marks: Mapping[str, FileMark], io: TensorIO) -> None:
        self.read_bytes = 0
        self._digests = digests
        self._marks = marks
        self._io = io
        self._good: set[tuple[str, int, int]] = set()
        self._lock = threading.Lock()

    def begin(self, spans: Sequence[ReadSpan]) -> SurroundingBytes | None:
        """Starts to read the surrounding bytes of new spans; None if there are none or too many."""
        new = self._new(spans)
        return self._begin(new) if 0 < len(new) <= _SPANS_MAX else None

    def check(
        self, spans: Sequence[ReadSpan], memory: Any, surroundings: SurroundingBytes | None
    ) -> None:
        """Compares spans with their digests, unless they were right before."""
        with self._lock:
            new = self._new(spans)
            if surroundings is not None and surroundings.spans == new:
                self._check(surroundings, memory)
                return
            for begin in range(0, len(new), _SPANS_MAX):
                self._check(self._begin(new[begin : begin + _SPANS_MAX]), memory)

    def forget(self, path: str) -> None:
        """Marks all of a file as unverified, to be compared again when it is read next."""
        with self._lock:
            self._good = {key for key in self._good if key[0] != path}

    def _new(self, spans: Sequence[ReadSpan]) -> list[ReadSpan]:
        return [span for span in spans if span.nbytes and span[:3] not in self._good]

    def _begin(self, spans: list[ReadSpan]) -> SurroundingBytes:
        pieces = [self._surroundings_of(span) for span in spans]
        requests = [
            (piece, span.path, offset)
            for span, both in zip(spans, pieces, strict=True)
            for piece, offset in both
        ]
        return SurroundingBytes(spans, pieces, self._read(self._io, requests))

    def _check(self, surroundings: SurroundingBytes, memory: Any) -> None:
        surroundings.transfer.result()
        for span, pieces in zip(surroundings.spans, surroundings.pieces, strict=True):
            inside = memory[span.place : span.place + span.nbytes]
            try:
                self._compare(span, pieces, inside)
            except CorruptCheckpointError:
                # The page cache may hold damaged bytes where the device has the right ones, or vice
                # versa.
                again = [(piece, span.path, offset) for piece, offset in pieces]
                _drop_cache(span.path)
                with another(self._io, direct="auto") as past_cache:
                    again.append((inside, span.path, span.offset))
                    self._read(past_cache, again).result()
                self._compare(span, pieces, inside)
            if not self._digests.is_signed:
                self._good.add(span[:3])

    def _read(self, io: TensorIO, requests: list[tuple[Any, str, int]]) -> Transfer:
        requests = [one for one in requests if one[0].numel()]
        self.read_bytes += sum(piece.numel() for piece, _, _ in requests)
        transfer = io.read_all(requests)
        # `check` raises its error, if it is called; without it nobody needs the bytes.
        transfer.is_seen = True
        return transfer

    def _surroundings_of(self, span: ReadSpan) -> list[tuple[Any, int]]:
        """Memory for the bytes before a span and behind it, with their file offsets."""
        torch = dtypes.import_torch()
        chunk_bytes = self._digests.chunk_bytes
        end = span.offset + span.nbytes
        begin = span.offset // chunk_bytes * chunk_bytes
        last = min(-(-end // chunk_bytes) * chunk_bytes, self._marks[span.path].nbytes)
        return [
            (torch.empty(span.offset - begin, dtype=torch.uint8, device="cpu"), begin),
            (torch.empty(last - end, dtype=torch.uint8, device="cpu"), end),
        ]

    def _compare(self, span: ReadSpan, pieces: list[tuple[Any, int]], inside: Any) -> None:
        (before, begin), (behind, end) = pieces
        if inside.device.type != "cpu":
            # Compares the copy in the device's memory, which computes with it.
            inside = inside.to("cpu")
        self._digests.check(span.path, begin, [before, inside, behind], (span.offset, end))


def _drop_cache(path: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
