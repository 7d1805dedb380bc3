"""Tensors, arrays and buffers as memory that the native module reads or fills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import UnsupportedStateError
from penstock.tensors.dtypes import is_tensor
from penstock.tensors.memory import CPU, Memory, of_array, of_tensor

if TYPE_CHECKING:
    from penstock._native import _Array


def to_read_into(value: Any, memory: Memory) -> _Array:
    """What the native module fills.

    Args:
        value: What a caller has.
        memory: Where its elements lie.

    Raises:
        UnsupportedStateError: It has no memory that may be written to.
    """
    if memory.owner is not value and isinstance(memory.owner, type(value)):
        # The values of a conjugate view are others than those in memory.
        raise refusal("a conjugate or negated view cannot be read into: use the plain tensor")
    if isinstance(memory.owner, np.ndarray) and not memory.owner.flags.writeable:
        raise refusal("it is read-only and cannot be read into: use a writable copy")
    return native_of(memory)


def to_write_from(value: Any) -> _Array:
    """What the native module writes.

    Raises:
        UnsupportedStateError: It has no plain memory of the host.
        TypeError: It is neither a tensor nor an array nor a buffer.
    """
    memory = memory_of(value)
    if memory.device != CPU:
        raise refusal(f"it is on {memory.device}: use a tensor of the host, as of .cpu()")
    return native_of(memory)


def memory_of(value: Any) -> Memory:
    """Where the elements of a tensor of any device, of an array or a buffer lie.

    Raises:
        UnsupportedStateError: It has no plain memory.
        TypeError: It is neither a tensor nor an array nor a buffer.
    """
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


def native_of(memory: Memory) -> _Array:
    """A memory as the native module takes it."""
    owner = memory.owner
    if not isinstance(owner, np.ndarray):
        # Another storage may be set on a tensor at any time (`tensor.data = …`).
        owner = owner, owner.untyped_storage()
    if memory.strides is None:
        return memory.address, (memory.nbytes,), None, 1, owner
    return memory.address, memory.shape, memory.strides, memory.item_bytes, owner


def refusal(problem: str) -> UnsupportedStateError:
    """The error for a tensor that cannot be read or written, and why."""
    return UnsupportedStateError(f"the tensor: {problem}", key="the tensor")
