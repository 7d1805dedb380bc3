"""Memory for weights, on the host or on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.tensors import dtypes

if TYPE_CHECKING:
    import torch


def on_device(nbytes: int, device: torch.device) -> Any:
    """Uninitialized bytes on a device."""
    return dtypes.import_torch().empty(nbytes, dtype=dtypes.import_torch().uint8, device=device)


class WeightMemory:
    """Host memory whose pages are allocated in the background, while the model is built and read.

    Allocating a `Buffers` first would wait up to seconds for a gigabyte, in which storage idles.
    One mapping for all weights needs no more pages than they have.

    Args:
        nbytes: Bytes to map; a thread starts to allocate their pages at once.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._native: _native.HostBuffer | None = _native.reserve(nbytes, nbytes)

    def tensor(self, nbytes: int) -> Any:
        """The first bytes of the memory; a larger mapping replaces it if there are too few."""
        torch = dtypes.import_torch()
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if nbytes > self._nbytes:
            # Frees the old mapping before making the new one.
            self._native = None
            self._nbytes, self._native = nbytes, _native.reserve(nbytes, nbytes)
        return torch.frombuffer(self._native, dtype=torch.uint8, count=nbytes)
