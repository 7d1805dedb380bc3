"""Files that are mapped into memory, and rows as pages that are faulted in."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock_bench.peers.gather.base import Plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock_bench.peers.gather.base import Setting


class Memmap(Plain):
    """`numpy.memmap`, indexed by the ids."""

    def open(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Maps it."""
        self._rows: Any = np.memmap(
            setting.file, np.int64, "r", setting.offset, (setting.rows, setting.words)
        )

    def one(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows of a batch."""
        return np.asarray(self._rows[ids])


class RandomMapped(Memmap):
    """The same, of a mapping that the kernel does not read ahead in."""

    def open(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Maps it."""
        with open(setting.file, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapping.madvise(mmap.MADV_RANDOM)
        count = setting.rows * setting.words
        whole = np.frombuffer(mapping, np.int64, count, setting.offset)
        self._rows = whole.reshape(setting.rows, setting.words)


class TorchMapped(Plain):
    """`torch.index_select` of a tensor over a mapping."""

    def open(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Maps it; copy-on-write, as tensors may be written to."""
        import torch

        mapped = np.memmap(
            setting.file, np.int64, "c", setting.offset, (setting.rows, setting.words)
        )
        self._rows = torch.from_numpy(mapped)
        self._torch = torch

    def one(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows of a batch."""
        index = self._torch.from_numpy(ids)
        found: np.ndarray[Any, Any] = self._torch.index_select(self._rows, 0, index).numpy()
        return found
