"""Converts tensors, arrays and buffers to memory that the native module reads or fills."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import UnsupportedStateError
from penstock.tensors.dtypes import is_tensor
from penstock.tensors.memory import CPU, Memory, of_array, of_tensor
from penstock.tensors.native_rows import NativeArray


def to_read_into(value: Any, memory: Memory) -> NativeArray:
    """Returns an array that the native module may fill."""
    if memory.owner is not value and isinstance(memory.owner, type(value)):
        # The elements in memory of a conjugate view are not its values.
        raise refusal("a conjugate or negated view cannot be read into: use the plain tensor")
    if isinstance(memory.owner, np.ndarray) and not memory.owner.flags.writeable:
        raise refusal("it is read-only and cannot be read into: use a writable copy")
    return native_of(memory)


def to_write_from(value: Any) -> NativeArray:
    """Returns an array that the native module writes to a file; its memory is on the host."""
    memory = memory_of(value)
    if memory.device != CPU:
        raise refusal(f"it is on {memory.device}: use a tensor of the host, as of .cpu()")
    return native_of(memory)


def memory_of(value: Any) -> Memory:
    """Returns the memory of a tensor on any device, of an array or of a buffer."""
    if is_tensor(value):
        return of_tensor(value, "the tensor")
    if isinstance(value, np.ndarray):
        return of_array(value, "the array")
    try:
        bytes_of = np.frombuffer(value, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"{type(value).__name__}: pass a tensor, an array or a contiguous buffer"
        ) from error
    return of_array(bytes_of, "the buffer")


def native_of(memory: Memory) -> NativeArray:
    """Converts a memory to the form that the native module takes."""
    owner = memory.owner
    if not isinstance(owner, np.ndarray):
        # A tensor may get another storage at any time (`tensor.data = …`), so the storage is held
        # too.
        owner = owner, owner.untyped_storage()
    if memory.strides is None:
        return NativeArray.of_bytes(memory.address, memory.nbytes, owner)
    return NativeArray(memory.address, memory.shape, memory.strides, memory.item_bytes, owner)


def refusal(problem: str) -> UnsupportedStateError:
    """Returns the error for a tensor that cannot be read or written, with the reason."""
    return UnsupportedStateError(f"the tensor: {problem}", key="the tensor")
