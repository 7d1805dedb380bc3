"""Locked tensors; all ops of a process share one registry of them."""

from __future__ import annotations

import operator
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import PenstockWarning, StorageError
from penstock.offload import Buffers

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNBOUNDED = 1 << 62

_lock = threading.Lock()
_regions: dict[int, tuple[int, torch.Tensor]] = {}
"""By a region's address: its end, and the tensor that keeps it alive."""

_locked = Buffers(_UNBOUNDED, lock=True)
_plain = Buffers(_UNBOUNDED)
_has_warned = False


def new(count: int, example: torch.Tensor) -> torch.Tensor:
    """A one-dimensional uninitialized tensor of another tensor's type, page-aligned and locked."""
    global _has_warned
    count = operator.index(count)
    tensor: torch.Tensor
    try:
        tensor = _locked.empty(count, example.dtype)
    except StorageError as error:
        tensor = _plain.empty(count, example.dtype)
        if not _has_warned:
            _has_warned = True
            warnings.warn(
                PenstockWarning(f"tensors are not locked: {error} (raise `ulimit -l`)"),
                stacklevel=3,
            )
    if count > 0:
        with _lock:
            # Another tensor on this memory, so that finalizers of the returned one still run.
            _regions[tensor.data_ptr()] = (tensor.data_ptr() + tensor.nbytes, tensor.detach())
    return tensor


def free(address: int) -> bool:
    """Forgets a region by its address; the memory is released with the last tensor in it.

    Returns:
        Whether there was a region.
    """
    with _lock:
        return _regions.pop(address, None) is not None


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor is in locked memory, of PyTorch or of Penstock."""
    if tensor.device.type != "cpu":
        return False
    if torch.cuda.is_available() and tensor.is_pinned():
        return True
    begin = tensor.data_ptr()
    end = begin + tensor.nbytes
    with _lock:
        return any(base <= begin and end <= last for base, last in _spans())


def _spans() -> Iterator[tuple[int, int]]:
    return ((base, last) for base, (last, _) in _regions.items())


class PinHandle:
    """The op ``pin_memory``: locked tensors without I/O."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A one-dimensional tensor of another tensor's type, page-aligned and locked."""
        return new(num_elem, example_tensor)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Forgets a locked tensor; returns whether it was one."""
        return free(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Forgets a locked tensor by its address; returns whether it was one."""
        return free(address)

    def is_pinned(self, buffer: Any) -> bool:
        """Whether a tensor is in locked memory."""
        return is_pinned(buffer)
