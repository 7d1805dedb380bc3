"""`SampleRows`: the elements of samples of a GPT dataset, read together into one memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from penstock.integrations.megatron.datasets.bin_reader import BinReader
from penstock.integrations.megatron.datasets.by_identity import ByIdentity

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.features.gathering.pending import PendingRows

_get = IndexedDataset.get
_Integers = np.ndarray[Any, np.dtype[np.int64]]


class Rows(NamedTuple):
    """The places of samples in the data file, as rows: one row is a document or a part of one.

    The rows of a sample follow each other, and samples are in the order of the call. All arrays
    are int64.

    Attributes:
        documents: Index of each row's document; shape (rows,).
        offsets: Offset of each row in the data file, in bytes; shape (rows,).
        lengths: Number of elements of each row; shape (rows,).
        firsts: Index of each sample's first row, then the number of rows; shape (samples + 1,).
    """

    documents: _Integers
    offsets: _Integers
    lengths: _Integers
    firsts: _Integers


def rows_of(dataset: Any, numbers: _Integers) -> Rows:
    """The rows of samples, as a GPT dataset's three indices and that of its data file name them."""
    index = dataset.dataset.index
    # Plain arrays: an access to a part of a `memmap` takes five times as long.
    shuffle, samples, order = map(
        np.asarray, (dataset.shuffle_index, dataset.sample_index, dataset.document_index)
    )
    places = shuffle[numbers].astype(np.int64)
    begins, ends = samples[places].astype(np.int64), samples[places + 1].astype(np.int64)
    counts = ends[:, 0] - begins[:, 0] + 1
    firsts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=firsts[1:])
    within = np.arange(firsts[-1]) - np.repeat(firsts[:-1] - begins[:, 0], counts)
    documents = order[within].astype(np.int64)
    starts, stops = np.zeros_like(documents), index.sequence_lengths[documents].astype(np.int64)
    starts[firsts[:-1]] = begins[:, 1]
    stops[firsts[1:] - 1] = ends[:, 1] + dataset.config.add_extra_token_to_sequence
    offsets = index.sequence_pointers[documents] + starts * index.dtype_size
    return Rows(documents, offsets, stops - starts, firsts)


class SampleRows:
    """The elements of some samples of one dataset, which it does not keep alive.

    Args:
        dataset: A GPT dataset whose data file a `BinReader` reads, with its indices open.
        numbers: Samples that it has.

    Attributes:
        count: Number of rows.
        nbytes: Bytes of all rows.
        reader: Reads the data file.

    Raises:
        CorruptCheckpointError: The data file has no such bytes.
    """

    def __init__(self, dataset: Any, numbers: _Integers) -> None:
        self.reader: BinReader = dataset.dataset.bin_reader
        self._rows = rows = rows_of(dataset, numbers)
        self._samples = dict(zip(numbers.tolist(), range(len(numbers)), strict=True))
        self._ends = np.zeros(len(rows.lengths) + 1, np.int64)
        np.cumsum(rows.lengths, out=self._ends[1:])
        item_bytes = dataset.dataset.index.dtype_size
        sizes = rows.lengths * item_bytes
        # An offset close to 2**63 cannot overflow on this side.
        bad = (rows.offsets < 0) | (sizes < 0) | (rows.offsets > self.reader.file.nbytes - sizes)
        if bad.any():
            at = int(bad.argmax())
            self.reader.check(int(rows.offsets[at]), int(sizes[at]))
        self.count, self.nbytes = len(sizes), int(self._ends[-1]) * item_bytes
        self._memory = np.empty(int(self._ends[-1]), dataset.dataset.index.dtype)
        self._ranges = np.stack((rows.offsets, rows.offsets + sizes), 1).astype(np.uint64)
        self._pending: PendingRows | None = None
        self._places: dict[tuple[int, int], int] | None = None

    def begin(self) -> None:
        """Copies the rows if all are in the page cache, or begins to read them."""
        file = self.reader.file
        if not file.copy_cached(self._ranges, self._memory):
            self._pending = file.read(self._ranges, self._memory, None)

    def wait(self) -> None:
        """Waits until all rows are read; raises if they cannot be."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def sample(self, dataset: Any, number: int, make: Callable[[Any, int], Any]) -> Any:
        """The elements of a sample, its documents, and what else Megatron-Core's method returns.

        The first sample of each dataset is also made by that method. If it returns anything else,
        or if rows are not read as by Megatron-Core, it makes all others, too.
        """
        at = self._samples.get(number)
        results = _results_of.get(dataset)
        if at is None or results == 0:
            return make(dataset, number)
        if results is not None:
            return self._made(dataset, at)[:results]
        theirs = make(dataset, number)
        is_same = _reads_plain_rows(dataset.dataset) and _is_same(
            self._made(dataset, at)[: len(theirs)], theirs
        )
        _results_of.set(dataset, len(theirs) if is_same else 0)
        return theirs

    def _made(self, dataset: Any, at: int) -> tuple[Any, ...]:
        first, last = self._rows.firsts[at : at + 2].tolist()
        text = self._memory[self._ends[first] : self._ends[last]].astype(np.int64)
        config = dataset.config
        missing = config.sequence_length + config.add_extra_token_to_sequence - len(text)
        if missing > 0:
            text = np.append(text, np.full(missing, dataset._pad_token_id, np.int64))
        lengths = self._rows.lengths[first:last].tolist()
        return text, self._rows.documents[first:last], lengths

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray[Any, Any] | None:
        """A copy of one row; None if it is none of these."""
        if self._places is None:
            keys = zip(self._rows.offsets.tolist(), self._rows.lengths.tolist(), strict=True)
            self._places = dict(zip(keys, range(self.count), strict=True))
        at = self._places.get((int(offset), int(count)))
        if at is None or dtype != self._memory.dtype:
            return None
        # Callers may write to it, and rows of other samples may overlap it.
        return self._memory[self._ends[at] : self._ends[at + 1]].copy()


_results_of: ByIdentity[int] = ByIdentity()
"""How many results Megatron-Core's method has for a sample of a dataset; 0 if ours differ."""


def _reads_plain_rows(low: Any) -> bool:
    """Whether rows are the bytes of the file, and nothing of a program's own changes them."""
    return (
        getattr(type(low), "get", None) is _get
        and type(low.bin_reader).read is BinReader.read
        and "get" not in vars(low)
        and "read" not in vars(low.bin_reader)
    )


def _is_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return len(ours) == len(theirs) and all(
        np.asarray(one).dtype == np.asarray(other).dtype and np.array_equal(one, other)
        for one, other in zip(ours, theirs, strict=True)
    )
