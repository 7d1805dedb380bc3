"""Readers of DLIO's samples: its own, with the bytes read by Penstock past the page cache.

DLIO replaces each sample by a fixed image after the read, so only reads are ours; decoding and
transfers to a device do not take place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from dlio_benchmark.reader import indexed_binary_reader, npy_reader, npz_reader

from penstock.errors import CorruptCheckpointError
from penstock.integrations.dlio.array_files import ArrayFiles
from penstock.offload import TensorIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.offload import DataFile, Transfer

_ARRAY = "x"
"""Name of the samples in DLIO's ``.npz`` files."""

_OPEN_FILES_MAX = 64
"""Open files of a reader: a quarter of the lowest limit that systems give a process, 256."""


class NPYReader(npy_reader.NPYReader):  # type: ignore[misc]
    """Reads ``.npy`` files (``format: npy``) by direct I/O, many requests at a time.

    Raises:
        StorageError: A file cannot be read.
        CorruptCheckpointError: A file is none of NumPy's, or too short.
        UnsupportedStateError: A file has Python objects.

    Example:
        ```yaml
        reader:
          reader_classname: penstock.integrations.dlio.NPYReader
        ```
    """

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index, epoch)
        self._files = ArrayFiles()

    def open(self, filename: str) -> np.ndarray[Any, Any]:
        """Reads a file."""
        return self._files.npy(filename)


class NPZReader(npz_reader.NPZReader):  # type: ignore[misc]
    """Reads ``.npz`` files (``format: npz``) by direct I/O, compressed or not.

    Every sample is compared with the CRC-32 in the archive, as NumPy does.

    Raises:
        StorageError: A file cannot be read.
        CorruptCheckpointError: A file is no archive, lacks the samples, or is damaged.
        UnsupportedStateError: A file has Python objects.
    """

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index, epoch)
        self._files = ArrayFiles()

    def open(self, filename: str) -> np.ndarray[Any, Any]:
        """Reads the samples of a file."""
        return self._files.npz(filename, _ARRAY)


class IndexedBinaryReader(indexed_binary_reader.IndexedBinaryReader):  # type: ignore[misc]
    """Reads ``indexed_binary`` and ``mmap_indexed_binary`` files by direct I/O, a batch at a time.

    PyTorch's loader asks for the samples of a batch one by one, in DLIO's order; so the first
    sample of a batch starts the reads of all.

    Raises:
        StorageError: A file cannot be read, or ends before a sample.
        CorruptCheckpointError: An index has fewer samples than the run file says.
    """

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        self._io = TensorIO()
        self._opened: dict[str, DataFile] = {}
        self._ahead: dict[tuple[str, int], tuple[np.ndarray[Any, Any], Transfer]] = {}
        super().__init__(dataset_type, thread_index, epoch)

    def read_longs(self, f: Any, n: int) -> np.ndarray[Any, Any]:
        """Reads the offsets or the sizes of all samples of a file."""
        found = np.fromfile(f, np.int64, n)
        if len(found) < n:
            raise CorruptCheckpointError(
                f"{f.name}: {len(found)} samples are indexed, and the run file says "
                f"num_samples_per_file: {n}: correct it, or generate the data again",
                path=f.name,
            )
        return found

    def open(self, filename: str) -> DataFile:
        """Opens a file, unless it is open; the file that was used least recently is closed."""
        file = self._opened.pop(filename, None)
        if file is None:
            if len(self._opened) >= _OPEN_FILES_MAX:
                self._close_oldest()
            file = self._io.open(filename)
        self._opened[filename] = file
        return file

    def close(self, filename: str) -> None:
        """Leaves the file open: DLIO closes it after each sample, and reads more of them."""

    def _close_oldest(self) -> None:
        oldest = next(iter(self._opened))
        # A file stays open while it is read. Errors are raised where the sample is asked for.
        for (filename, _), (_, transfer) in self._ahead.items():
            if filename == oldest:
                transfer.ends_within(None)
        self._opened.pop(oldest).close()

    def read_index(self, global_sample_idx: int, step: int) -> Any:
        """Reads a sample, and starts the reads of those that follow in its batch."""
        if self.global_index_map[global_sample_idx] not in self._ahead:
            self._ahead.clear()
            for filename, sample_index in self._batch(global_sample_idx):
                self._ahead[filename, sample_index] = self._start(filename, sample_index)
        return super().read_index(global_sample_idx, step)

    def get_sample(self, filename: str, sample_index: int) -> None:
        """Waits for the bytes of a sample."""
        at = filename, sample_index
        _, transfer = self._ahead.pop(at) if at in self._ahead else self._start(*at)
        transfer.result()

    def _batch(self, first: int) -> Iterator[tuple[str, int]]:
        """Yields file and index of as many samples as a batch has."""
        for number in range(first, first + self.batch_size):
            if number in self.global_index_map:
                yield self.global_index_map[number]

    def _start(self, filename: str, sample_index: int) -> tuple[np.ndarray[Any, Any], Transfer]:
        offsets, sizes = self.file_map_ibr[filename]
        sample = np.empty(sizes[sample_index], np.uint8)
        return sample, self._io.read(sample, self.open(filename), int(offsets[sample_index]))
