"""`BinReader`: the data file (``.bin``) of an indexed dataset, read for Megatron-Core."""

from __future__ import annotations

import os
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from megatron.core.datasets.indexed_dataset import _BinReader

from penstock.errors import CorruptCheckpointError
from penstock.features.indexed.range_file import RangeFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.features.indexed.index_file import IndexFile
    from penstock.offload import TensorIO


_READS_A_LOOK = 16
"""Reads after one that was not in the page cache until it is looked at again."""


class Way(Protocol):
    """Another way to get bytes and samples than to read them at once."""

    def read(
        self, reader: BinReader, dtype: Any, count: int, offset: int
    ) -> np.ndarray[Any, Any] | None:
        """The elements; None if they have to be read."""

    def sample(self, dataset: Any, number: int, make: Callable[[Any, int], Any]) -> Any:
        """A sample of a GPT dataset, which Megatron-Core's ``make`` makes row by row."""


_way: ContextVar[Way | None] = ContextVar("penstock_way_of_bin_readers", default=None)


@contextmanager
def reading(way: Way) -> Iterator[None]:
    """Lets all datasets and readers of this thread ask a way first, for a block."""
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


def answering(make: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """A method of GPT datasets that makes the elements of a sample, and asks a way first."""

    @wraps(make)
    def answered(dataset: Any, idx: int) -> Any:
        way = _way.get()
        return make(dataset, idx) if way is None else way.sample(dataset, int(idx), make)

    return answered


class BinReader(_BinReader):  # type: ignore[misc]
    """Reads the data file of an indexed dataset past the page cache, but for rows that are there.

    Arrays have memory of their own. Forked and spawned workers open the file themselves.

    Args:
        bin_path: The file, as an absolute path.
        index: Its index, which must not change either; None for none.
        io: Settings of the I/O workers.

    Attributes:
        file: The file.

    Raises:
        CheckpointNotFoundError: There is no such file.
        StorageError: The file cannot be opened, or the requested engine cannot run.
        UnsupportedStateError: Requests of ``io`` are shorter than 12 KiB.
    """

    def __init__(
        self, bin_path: str, index: IndexFile | None = None, io: TensorIO | None = None
    ) -> None:
        others = None if index is None else {index.path: index.mark}
        self.file = RangeFile(os.fspath(bin_path), others=others, io=io)
        self._reads_to_look = 0

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray[Any, Any]:
        """Reads elements.

        Args:
            dtype: Their type.
            count: Their number.
            offset: Where they begin in the file, in bytes.

        Raises:
            CorruptCheckpointError: The file has no such bytes, or has changed.
            TransferError: The bytes cannot be read.
        """
        way = _way.get()
        if way is not None and (found := way.read(self, dtype, count, offset)) is not None:
            return found
        count, offset = int(count), int(offset)
        values = np.empty(max(0, count), dtype)
        self.check(offset, count * values.itemsize)
        ranges = np.array([[offset, offset + values.nbytes]], np.uint64)
        if self._reads_to_look:
            self._reads_to_look -= 1
        elif self.file.copy_cached(ranges, values):
            return values
        else:
            self._reads_to_look = _READS_A_LOOK - 1
        read: np.ndarray[Any, Any] = self.file.read(ranges, values, values).result()
        return read

    def check(self, offset: int, nbytes: int) -> None:
        """Raises `CorruptCheckpointError` unless the file has these bytes."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.file.nbytes:
            directory, name = os.path.split(self.file.path)
            raise CorruptCheckpointError(
                f"{self.file.path}: its index names bytes {offset} to {offset + nbytes}, and it has"
                f" {self.file.nbytes}: get both files again",
                path=directory,
                file=name,
            )
