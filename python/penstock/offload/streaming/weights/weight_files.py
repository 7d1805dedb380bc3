"""`WeightFiles`: reads weights from files, and detects changes of the files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import CorruptCheckpointError, StorageError, TransferError
from penstock.io.files.file_marks import REASONS, Change, FileMarks
from penstock.io.own_io import wait_until_idle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.io.data_file import DataFile
    from penstock.io.files.file_marks import FileMark
    from penstock.io.tensor_io import TensorIO
    from penstock.io.transfer import Transfer
    from penstock.offload.streaming.weights.sealed_read import SealedRead, SealedReader
    from penstock.offload.streaming.weights.units import ReadSpan
    from penstock.offload.streaming.weights.verify_on_first_read import (
        FirstReadVerifier,
        SurroundingBytes,
    )

_REMEDIES = {
    Change.TOUCHED: "make the model again",
    Change.WRITTEN: "make the model again",
    Change.GONE: "put its directory back, or make the model of weights that are there",
}


class WeightFiles:
    """Reads spans of files; raises if a file has changed or, given digests, is damaged.

    Sealed files are read and opened by ``sealed``.
    """

    def __init__(
        self,
        io: TensorIO,
        marks: Mapping[str, FileMark],
        verifier: FirstReadVerifier | None,
        sealed: SealedReader | None = None,
    ) -> None:
        self._io = io
        self._marks = FileMarks(marks)
        self._verifier = verifier
        self._sealed = sealed
        self._files: dict[str, DataFile] = {}

    def begin(
        self, spans: Sequence[ReadSpan], memory: Any, named: Callable[[str, int], str]
    ) -> Transfer | SealedRead:
        """Starts to read; only one thread may call it at a time.

        ``named`` names the tensor that holds a byte of a file, or the first behind it.
        """
        try:
            if self._sealed is not None:
                return self._sealed.begin(spans, memory, self._file)
            transfer = self._io.read_all(
                (memory[span.place : span.place + span.nbytes], self._file(span.path), span.offset)
                for span in spans
            )
        except StorageError:
            self._check_files(spans, named)
            raise
        # `finish` raises its error, if it is called; without it nobody needs the weights.
        transfer.is_seen = True
        return transfer

    def finish(
        self,
        spans: Sequence[ReadSpan],
        memory: Any,
        transfer: Transfer | SealedRead,
        named: Callable[[str, int], str],
        surroundings: SurroundingBytes | None = None,
    ) -> None:
        """Waits until spans are read, and verifies them."""
        try:
            transfer.result()
        except TransferError as error:
            self._check_files(spans, named)
            raise TransferError(
                f"{named(error.path, error.offset)}: {error}",
                path=error.path,
                errno=error.errno,
                offset=error.offset,
            ) from error
        self._check_files(spans, named)
        if self._verifier is not None:
            self._verifier.check(spans, memory, surroundings)

    def wait_until_idle(self) -> None:
        """Waits until nothing uses memory of a caller; failures stay for their transfers."""
        wait_until_idle(self._io)
        if self._sealed is not None:
            self._sealed.wait_ended()

    def _file(self, path: str) -> DataFile:
        if path not in self._files:
            self._files[path] = self._io.open(path)
        return self._files[path]

    def _check_files(self, spans: Sequence[ReadSpan], named: Callable[[str, int], str]) -> None:
        """Raises `CorruptCheckpointError` if a file was written to, replaced or removed since."""
        for span in spans:
            change, mark = self._marks.inspect(span.path)
            if change is Change.NONE:
                continue
            if self._verifier is not None and change is Change.TOUCHED:
                # Digests decide whether a touched file still has the stored bytes.
                self._verifier.forget(span.path)
                self._marks.accept(span.path, mark)
                continue
            if self._sealed is not None and change is not Change.GONE:
                # Tags have decided: the bytes are those that were sealed.
                self._marks.accept(span.path, mark)
                continue
            name, path = named(span.path, span.offset), Path(span.path)
            raise CorruptCheckpointError(
                f"{name}: {path} {REASONS[change]} since the model was made: {_REMEDIES[change]}",
                path=str(path.parent),
                file=path.name,
                tensor=name,
            )
