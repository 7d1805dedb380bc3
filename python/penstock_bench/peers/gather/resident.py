"""Rows in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock_bench.peers.gather.base import Plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock_bench.peers.gather.base import Setting


class Resident(Plain):
    """`torch.index_select` of a tensor that has all rows up to the last that is asked for.

    Args:
        reuses: Whether results go to memory that is used again, which has no page faults; else each
            is a tensor of its own, as loaders make them.
    """

    def __init__(self, *, reuses: bool = False) -> None:
        self._reuses = reuses

    def open(self, setting: Setting, batches: Sequence[np.ndarray[Any, Any]]) -> None:
        """Reads them."""
        import torch

        count = 1 + max(int(ids.max()) for ids in batches)
        read = np.fromfile(setting.file, np.int64, count * setting.words, offset=setting.offset)
        self._rows = torch.from_numpy(read).view(count, setting.words)
        self._out: Any = torch.empty((max(map(len, batches)), setting.words), dtype=torch.int64)
        self._torch = torch

    def one(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows of a batch."""
        index = self._torch.from_numpy(ids)
        out = self._out[: len(ids)] if self._reuses else None
        found: np.ndarray[Any, Any] = self._torch.index_select(
            self._rows, 0, index, out=out
        ).numpy()
        return found
