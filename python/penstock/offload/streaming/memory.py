"""Memory that weights are read into, of the host or of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.tensors import dtypes

if TYPE_CHECKING:
    import torch


def on_device(nbytes: int, device: torch.device) -> Any:
    """So many bytes of a device."""
    return dtypes.import_torch().empty(nbytes, dtype=dtypes.import_torch().uint8, device=device)


class Memory:
    """Memory whose pages come in the background, while a model is made, or with what is read.

    That of `Buffers` is waited for, up to seconds for a gigabyte, in which storage has nothing to
    do. One mapping for all weights takes no more memory than they have pages.

    Args:
        nbytes: How much there is, behind which pages are put from now on.

    Raises:
        StorageError: The system has no room.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._native: _native.HostBuffer | None = _native.reserve(nbytes, nbytes)

    def tensor(self, nbytes: int) -> Any:
        """The first bytes of it; if there are too few, other memory takes its place."""
        torch = dtypes.import_torch()
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if nbytes > self._nbytes:
            # What was there has to be gone before there is something else.
            self._native = None
            self._nbytes, self._native = nbytes, _native.reserve(nbytes, nbytes)
        return torch.frombuffer(self._native, dtype=torch.uint8, count=nbytes)
