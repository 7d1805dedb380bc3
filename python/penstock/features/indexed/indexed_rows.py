"""`IndexedRows`: the rows of an indexed dataset, read by id."""

from __future__ import annotations

import operator
import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.common.option_kinds import Number
from penstock.common.paths import absolute
from penstock.errors import CorruptCheckpointError
from penstock.features.gathering.ids import ids_of, to_array
from penstock.features.gathering.lookahead import Lookahead
from penstock.features.gathering.results import Results
from penstock.features.indexed.index_file import IndexFile
from penstock.features.indexed.ragged import Ragged
from penstock.features.indexed.range_file import RangeFile
from penstock.tensors import dtypes
from penstock.tensors.arguments import decode_local_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from penstock.features.gathering.pending import PendingRows
    from penstock.io.tensor_io import TensorIO
    from penstock.reports import Fallback

_AHEAD = Number(0, 1 << 50, "bytes", is_open=False)
_AHEAD_BYTES = 64 << 20
_AHEAD_BATCHES = 512
"""Most batches of a stream in flight: with one request each, they fill the queues of four workers,
128 requests long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedStats:
    """Counters of an indexed dataset since this process opened it.

    Attributes:
        rows: Rows, or parts of rows, requested.
        requests: Read requests.
        read_bytes: Bytes read, with the gaps between rows; a range that several rows share counts
            once.
        engine: ``"uring"`` or ``"threads"``.
        direct: Whether reads bypass the page cache.
        fallbacks: Faster ways that could not be used, each with its reason.
    """

    rows: int
    requests: int
    read_bytes: int
    engine: str
    direct: bool
    fallbacks: tuple[Fallback, ...]


class IndexedRows:
    """Rows of an indexed dataset of Megatron-Core; made by `penstock.features.open_indexed`.

    Any thread may read. Rows of a batch that touch, overlap or are close together are one request,
    and the bytes go past the page cache where the file system allows it. A fork of the process, and
    a process that gets a pickled dataset, open the files again with the first read.

    Each read looks at the files: if one was changed since it was opened, the read fails.

    Args:
        prefix: Path of the dataset, without ``.idx`` and ``.bin``.
        multimodal: Whether each row has a mode.
        gap_bytes: As for `penstock.features.open`.
        io: Settings of the I/O workers, as `penstock.offload.TensorIO` takes them.

    Attributes:
        prefix: Absolute path of the dataset, without ``.idx`` and ``.bin``.
        dtype: Name of the element type.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str] | bytes,
        *,
        multimodal: bool = False,
        gap_bytes: int | None = None,
        io: TensorIO | None = None,
    ) -> None:
        # Absolute, as the working directory may change later.
        self.prefix = absolute(decode_local_path(prefix))
        self._index = IndexFile.open(f"{self.prefix}.idx", multimodal=multimodal)
        self._file = RangeFile(
            f"{self.prefix}.bin",
            others={self._index.path: self._index.mark},
            gap_bytes=gap_bytes,
            io=io,
        )
        self.dtype = self._index.dtype
        self._results = _ResultsHere(self.dtype, self._index.item_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self.prefix, self._index.modes is not None, self._file)

    def __len__(self) -> int:
        return len(self._index.lengths)

    def __repr__(self) -> str:
        state = " closed" if self._file.closed else ""
        return f"<IndexedRows {self.prefix!r} {self.dtype}, {len(self)} rows{state}>"

    @property
    def sequence_lengths(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Elements of each row."""
        return self._index.lengths

    @property
    def sequence_pointers(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where each row begins in the data file, in bytes."""
        return self._index.pointers

    @property
    def document_indices(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The first row of each document, and the number of rows at the end."""
        return self._index.documents

    @property
    def sequence_modes(self) -> np.ndarray[Any, np.dtype[np.int8]] | None:
        """The mode of each row; None unless the dataset was opened as a multimodal one."""
        return self._index.modes

    def gather(self, ids: Any, *, starts: Any = 0, lengths: Any = None) -> Ragged:
        """Reads rows, or a part of each, in the order of the ids; an id may occur repeatedly.

        Args:
            ids: Integers: a tensor, an array or a sequence, of one dimension.
            starts: The first element to read of each row: an integer, or one for each id.
            lengths: Number of elements to read of each row: likewise; None up to the end of the
                row.

        Returns:
            The elements and the offsets of the rows in them: tensors if ``ids`` is one, else
            arrays.

        Raises:
            IndexError: An id has no row, or a row has no such part.
            TransferError: Bytes cannot be read.
            CorruptCheckpointError: A file has changed, or the index names bytes that the data file
                does not have.
            TypeError: The ids, starts or lengths are no integers.
            ValueError: The dataset is closed, or there are not as many starts or lengths as ids.
        """
        ragged: Ragged = self.gather_async(ids, starts=starts, lengths=lengths).result()
        return ragged

    def gather_async(self, ids: Any, *, starts: Any = 0, lengths: Any = None) -> PendingRows:
        """Begins to read rows; see `gather`. The result must not be used before it is done."""
        pending, _ = self._begin(ids, starts, lengths)
        return pending

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """Reads a row, or a part of it; see `gather`.

        Args:
            idx: The id.
            offset: The first element to read.
            length: Number of elements to read; None up to the end of the row.

        Returns:
            An array; with the mode of the row, if the dataset is multimodal.
        """
        idx = operator.index(idx)
        values = self.gather([idx], starts=offset, lengths=length).values
        modes = self._index.modes
        return values if modes is None else (values, modes[idx])

    def __getitem__(self, idx: int | slice) -> Any:
        """Reads a row, or consecutive ones, as Megatron-Core's `IndexedDataset` returns them.

        Raises:
            ValueError: The step of a slice is not 1.
        """
        if not isinstance(idx, slice):
            idx = operator.index(idx)
            return self.get(idx + len(self) if idx < 0 else idx)
        first, last, step = idx.indices(len(self))
        if step != 1:
            raise ValueError("Slices into indexed_dataset must be contiguous")
        rows = self.gather(np.arange(first, max(first, last))).rows()
        modes = self._index.modes
        return rows if modes is None else (rows, modes[first:last])

    def stream(
        self, batches: Iterable[Any], *, ahead_bytes: int = _AHEAD_BYTES
    ) -> Iterator[tuple[Any, Ragged]]:
        """Yields the rows of batch after batch, and reads later ones meanwhile.

        Args:
            batches: The ids of each batch.
            ahead_bytes: Bytes of rows that are read ahead of the batch that is waited for; at
                least one batch is, and fewer than 512 are.

        Yields:
            The ids of a batch (of arrays, tensors and lists a copy) and its rows. An error raised
            by ``batches``, or for the ids of a batch, is raised after all batches before it, with a
            note that names the batch.

        Raises:
            TypeError: ``batches`` is no iterable.
            ValueError: ``ahead_bytes`` is out of range.
        """
        _AHEAD.check("ahead_bytes", ahead_bytes)
        begun: deque[tuple[Any, tuple[PendingRows, int]]] = deque()
        coming, ahead = Lookahead(batches), 0
        while True:
            while len(begun) < 2 or (ahead < ahead_bytes and len(begun) < _AHEAD_BATCHES):
                batch = coming.next(self._begin)
                if batch is None:
                    break
                begun.append(batch)
                ahead += batch[1][1]
            if not begun:
                break
            ids, (pending, nbytes) = begun.popleft()
            ahead -= nbytes
            yield ids, pending.result()
        coming.end()

    def stats(self) -> IndexedStats:
        """Counters of this process since it opened the dataset."""
        counts = self._file.counts
        return IndexedStats(
            rows=counts.rows,
            requests=counts.requests,
            read_bytes=counts.read_bytes,
            engine=self._file.engine,
            direct=self._file.is_direct,
            fallbacks=self._file.fallbacks,
        )

    def close(self) -> None:
        """Waits for reads under way, then closes the files and releases the workers."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, ids: Any, starts: Any = 0, lengths: Any = None) -> tuple[PendingRows, int]:
        """Begins to read rows; also returns the number of their bytes."""
        numbers = ids_of(ids)
        if len(numbers.shape) != 1:
            raise ValueError(f"ids: of the shape {numbers.shape}: use one dimension")
        # The index is mapped: a process that touches pages that were cut off is killed.
        self._file.check()
        begins, counts = self._parts(numbers.values, starts, lengths)
        offsets = np.zeros(len(begins) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        item_bytes = self._index.item_bytes
        ranges = np.empty((len(begins), 2), np.uint64)
        ranges[:, 0] = begins
        ranges[:, 1] = begins + counts * item_bytes
        total = int(offsets[-1])
        values = self._results.get().empty((total,), is_torch=numbers.is_torch)
        result = Ragged(values, offsets)
        if numbers.is_torch:
            result = Ragged(values, dtypes.import_torch().from_numpy(offsets))
        return self._file.read(ranges, values, result), total * item_bytes

    def _parts(self, ids: np.ndarray[Any, Any], starts: Any, lengths: Any) -> tuple[Any, Any]:
        """Where the requested parts begin in the data file, in bytes, and their elements."""
        rows = len(self)
        _refuse((ids < 0) | (ids >= rows), lambda at: f"ids[{at}] is {ids[at]}: {self._has(rows)}")
        where = ids.astype(np.int64, copy=False)
        begins, whole = self._index.pointers[where], self._index.lengths[where].astype(np.int64)
        self._check_pointers(where, begins, whole)
        first = _elements("starts", starts, whole.shape)
        counts = whole - first if lengths is None else _elements("lengths", lengths, whole.shape)
        _refuse(
            (first < 0) | (counts < 0) | (counts > whole - first),
            lambda at: (
                f"ids[{at}] is {ids[at]}: elements {first[at]} to {first[at] + counts[at]} of a row"
                f" of {whole[at]} ({self.prefix})"
            ),
        )
        return begins + first * self._index.item_bytes, counts

    def _check_pointers(self, ids: Any, begins: Any, counts: Any) -> None:
        """Raises `CorruptCheckpointError` unless the data file has the whole rows."""
        item_bytes = self._index.item_bytes
        # A pointer close to 2**63 cannot overflow on this side.
        behind = begins > self._file.nbytes - counts * item_bytes
        bad = (begins < 0) | (counts < 0) | behind
        if bad.any():
            at = int(bad.argmax())
            directory, name = os.path.split(self._index.path)
            raise CorruptCheckpointError(
                f"{self._index.path}: row {ids[at]} has {counts[at]} elements at byte {begins[at]},"
                f" and {self._file.path} has {self._file.nbytes} bytes: get both files again",
                path=directory,
                file=name,
            )

    def _has(self, rows: int) -> str:
        return f"{self.prefix} has rows 0 to {rows - 1}" if rows else f"{self.prefix} has no rows"


class _ResultsHere:
    """The `Results` of this process: a fork must not wait for a lock of its parent's."""

    def __init__(self, dtype: str, item_bytes: int) -> None:
        self._form = dtype, item_bytes
        self._made: tuple[int, Results] | None = None

    def get(self) -> Results:
        """Those of this process, which may be a fork of the one that made others."""
        made = self._made
        if made is None or made[0] != os.getpid():
            made = self._made = os.getpid(), Results(*self._form)
        return made[1]


def _refuse(bad: np.ndarray[Any, Any], message: Any) -> None:
    if bad.any():
        raise IndexError(message(int(bad.argmax())))


def _elements(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Starts or lengths of a caller, one for each id."""
    found = to_array(value, name)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name}: {found.dtype}: use integers")
    if found.shape not in ((), shape):
        raise ValueError(f"{name}: of the shape {found.shape} for ids of the shape {shape}")
    return np.broadcast_to(found.astype(np.int64), shape)


def _opened_again(prefix: str, multimodal: bool, file: RangeFile) -> IndexedRows:
    made = object.__new__(IndexedRows)
    made.prefix = prefix
    made._index = IndexFile.open(f"{prefix}.idx", multimodal=multimodal)
    made._file = file
    made.dtype = made._index.dtype
    made._results = _ResultsHere(made.dtype, made._index.item_bytes)
    file.check()
    return made
