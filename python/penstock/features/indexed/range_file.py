"""`RangeFile`: byte ranges of one file, read in batches."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock import _native
from penstock.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from penstock.features.gathering.pending import PendingRows
from penstock.features.gathering.requests import GAP, GAP_BYTES, RUN_BYTES_MAX, check_ranges
from penstock.features.gathering.results import target_of
from penstock.io.data_file import reach
from penstock.io.files.file_marks import REASONS, Change, FileMark, FileMarks
from penstock.io.own_io import claim_of, for_rows
from penstock.reports import Fallback
from penstock.tensors.native_rows import NativeArray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.io.tensor_io import TensorIO

_opening = threading.Lock()


class _Opened(NamedTuple):
    """The open file of one process.

    Attributes:
        process: The process.
        reader: Reads the file.
        engine: ``"uring"`` or ``"threads"``.
        is_direct: Whether reads bypass the page cache.
        fallbacks: Faster ways that could not be used.
    """

    process: int
    reader: _native.RangeReader
    engine: str
    is_direct: bool
    fallbacks: tuple[Fallback, ...]


class _Descriptor:
    """A descriptor, closed when nobody holds it: a copy under way keeps its number from others.

    Args:
        number: The descriptor, which it owns from then on.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)


class RangeFile:
    """A file whose byte ranges any thread reads, past the page cache where that is possible.

    A forked process, and one that unpickles it, opens the file again with the first read: the file
    has to be the same.

    Args:
        path: The file, as an absolute path: the working directory may change before it is opened
            again.
        others: Files that must not change either, each with its mark.
        gap_bytes: As for `penstock.features.open`.
        io: Settings of the I/O workers.

    Attributes:
        path: The file.
        nbytes: Its size when it was opened first.

    Raises:
        CheckpointNotFoundError: There is no such file.
        StorageError: The file cannot be opened, or the requested engine cannot run.
        UnsupportedStateError: Requests of ``io`` are shorter than 12 KiB.
        ValueError: ``gap_bytes`` is out of range.
    """

    def __init__(
        self,
        path: str,
        *,
        others: Mapping[str, FileMark] | None = None,
        gap_bytes: int | None = None,
        io: TensorIO | None = None,
    ) -> None:
        gap_bytes = GAP_BYTES if gap_bytes is None else gap_bytes
        GAP.check("gap_bytes", gap_bytes)
        try:
            mark = FileMark.of(os.stat(path))
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"{path}: there is no such file", path=path) from None
        except OSError as error:
            raise StorageError(
                f"cannot read {path}: {error.strerror}", path=path, errno=error.errno
            ) from error
        self._set(path, {path: mark, **(others or {})}, gap_bytes, for_rows(io))

    def _set(
        self, path: str, marks: dict[str, FileMark], gap_bytes: int, io: TensorIO | None
    ) -> None:
        self.path = path
        self.nbytes = marks[path].nbytes
        self._of_marks = marks
        self._marks = FileMarks(marks)
        self._gap_bytes = gap_bytes
        self._io = io
        self._opened: _Opened | None = None
        self._buffered: _Descriptor | None = None
        self._here()

    def __getstate__(self) -> tuple[Any, ...]:
        self._here()
        return self.path, self._of_marks, self._gap_bytes, self._io

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._set(*state)

    def read(
        self, ranges: np.ndarray[Any, np.dtype[np.uint64]], out: Any, rows: Any
    ) -> PendingRows:
        """Begins to read ranges into consecutive parts of memory.

        Args:
            ranges: The first byte of each range and the byte behind it, of the shape ``(count, 2)``
                and C-contiguous; none of them ends behind the file.
            out: An array or a tensor of the host with as many bytes as all ranges have.
            rows: The result of the wait.

        Raises:
            PenstockError: An executor cannot be started.
            ValueError: The file is closed.
        """
        # Five times as fast as `ctypes.data`.
        address: int = ranges.__array_interface__["data"][0]
        array = NativeArray(address, (ranges.size,), None, ranges.itemsize, ranges)
        native = self._here().reader.read(array, target_of(out))
        return PendingRows(native, rows, self.check)

    def copy_cached(
        self, ranges: np.ndarray[Any, np.dtype[np.uint64]], out: np.ndarray[Any, Any]
    ) -> bool:
        """Copies ranges that are in the page cache into consecutive parts of memory.

        It asks no worker and waits for no device: for a few small ranges nothing is quicker.

        Args:
            ranges: As for `read`.
            out: A contiguous array with as many bytes as all ranges have.

        Returns:
            False at the first range that is not in the page cache, where the system does not
            tell, and where the path leads to another file: the memory is undefined then.

        Raises:
            CorruptCheckpointError: A file has changed.
            ValueError: The file is closed.
        """
        memory, begin = out.reshape(-1).view(np.uint8).data, 0
        try:
            # Held here, as `close` in another thread lets go of it.
            buffered = self._through_cache()
            if buffered is None:
                return False
            for first, last in ranges.tolist():
                end = begin + last - first
                # A page that is not there is an error, or ends what is copied.
                copied = os.preadv(buffered.number, [memory[begin:end]], first, os.RWF_NOWAIT)
                if copied < end - begin:
                    return False
                begin = end
        except OSError:
            return False
        # After the copies, as in `PendingRows.result`.
        self.check()
        return True

    def _through_cache(self) -> _Descriptor | None:
        """Reads through the page cache; None if the path leads to another file than the mark's.

        Forks share it, as reads name offsets.
        """
        buffered = self._buffered
        if buffered is not None:
            return buffered
        with _opening:
            if self._buffered is None:
                self._raise_if_closed()
                opened = _Descriptor(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
                # The path may lead to the marked file again before anybody compares that.
                if not _is_marked(os.fstat(opened.number), self._of_marks[self.path]):
                    return None
                # The kernel reads ahead even for a read that does not wait, some MiB where it is
                # told to. In a file that is read at random it fetches only the pages that were
                # asked for.
                os.posix_fadvise(opened.number, 0, 0, os.POSIX_FADV_RANDOM)
                self._buffered = opened
            return self._buffered

    def check(self) -> None:
        """Raises `CorruptCheckpointError` if a file was written to, replaced or removed."""
        for path, mark in self._of_marks.items():
            if _is_same(path, mark):
                continue
            change, _ = self._marks.inspect(path)
            if change is not Change.NONE:
                directory, file = os.path.split(path)
                raise CorruptCheckpointError(
                    f"{path} {REASONS[change]} since the dataset was opened: "
                    f"{'put it back' if change is Change.GONE else 'open it again'}",
                    path=directory,
                    file=file,
                )

    @property
    def counts(self) -> _native.GatherCounts:
        """Counters of the reads of this process; a row is a range."""
        return self._here().reader.counts()

    @property
    def engine(self) -> str:
        """``"uring"`` or ``"threads"``."""
        return self._here().engine

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the page cache."""
        return self._here().is_direct

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Faster ways that could not be used, each with its reason."""
        return self._here().fallbacks

    def close(self) -> None:
        """Waits for reads under way, then closes the file and releases the workers."""
        with _opening:
            io, self._io = self._io, None
            self._buffered = None
        self._opened = None
        if io is not None:
            io.close()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._io is None

    def _here(self) -> _Opened:
        """The open file of this process, which may be a fork of the one that opened it."""
        opened = self._opened
        if opened is not None and opened.process == os.getpid():
            return opened
        with _opening:
            opened = self._opened
            if opened is None or opened.process != os.getpid():
                opened = self._opened = self._open_here()
            return opened

    def _raise_if_closed(self) -> TensorIO:
        """The settings of the I/O workers, unless the file is closed."""
        if self._io is None:
            raise ValueError(f"{self.path} is closed: open the dataset again")
        return self._io

    def _open_here(self) -> _Opened:
        claim = claim_of(self._raise_if_closed())
        file = reach(self.path, "r", claim.direct)
        with claim.workers(file) as (executor, _):
            check_ranges(self.path, claim.block_bytes)
            reader = _native.RangeReader(
                executor,
                claim.weight,
                file,
                gap_bytes=self._gap_bytes,
                run_bytes_max=RUN_BYTES_MAX,
            )
        # After it was opened, as the file of the path may be another one than that of the mark.
        self.check()
        fallbacks = () if file.fallback is None else (Fallback(file.fallback, "buffered"),)
        return _Opened(os.getpid(), reader, executor.engine, file.direct, fallbacks)


def _is_same(path: str, mark: FileMark) -> bool:
    """Whether a file has its mark: quicker than `FileMarks.inspect`, which finds what differs."""
    try:
        return _is_marked(os.stat(path), mark)
    except OSError:
        return False


def _is_marked(found: os.stat_result, mark: FileMark) -> bool:
    return (
        found.st_ctime_ns == mark.changed_ns
        and found.st_mtime_ns == mark.modified_ns
        and found.st_size == mark.nbytes
        and found.st_ino == mark.number
        and found.st_dev == mark.device
    )


def _renew_lock() -> None:
    global _opening
    _opening = threading.Lock()


# A thread of the parent may have held it.
os.register_at_fork(after_in_child=_renew_lock)
