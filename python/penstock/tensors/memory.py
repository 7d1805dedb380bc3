"""`Memory`: address, layout and device of a tensor's or array's elements.

The native module copies directly from this memory, so every case in which an address would be wrong
is refused here: freed or too small storage, layouts without strides, elements that are not plain
bytes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import UnsupportedStateError
from penstock.tensors import dtypes
from penstock.tensors.devices import CurrentStreams, is_scattered
from penstock.tensors.native_rows import GlobalBox, TensorSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

CPU = "cpu"


@dataclass(slots=True)
class Memory:
    """The elements of one tensor or array.

    Attributes:
        owner: The tensor or array itself, which keeps the memory alive.
        dtype: Name of the element type.
        item_bytes: Bytes of an element.
        shape: Dimensions.
        strides: Bytes between neighbours along each dimension; None if C-contiguous.
        address: Address of element 0.
        low: Address of the first byte of any element.
        high: Address after the last byte; equal to ``low`` if nothing can be tied by address.
        device: The device of the addresses.
    """

    owner: Any
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    address: int
    low: int
    high: int
    device: str

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes; elements that share memory count separately."""
        items = self.item_bytes
        for dim in self.shape:
            items *= dim
        return items


def of_array(array: np.ndarray[Any, Any], name: str) -> Memory:
    """Returns the memory of an array."""
    dtype = dtypes.numpy_name(array.dtype)
    if dtype is None:
        raise UnsupportedStateError(
            f"{name}: an array of dtype {array.dtype} cannot be stored: {_array_remedy(array)}",
            key=name,
        )
    address = int(array.__array_interface__["data"][0])
    strides = None if array.flags.c_contiguous else array.strides
    low, high = address, address + array.nbytes
    if strides is not None:
        low, high = _span(address, array.shape, strides, array.itemsize)
    return Memory(array, dtype, array.itemsize, array.shape, strides, address, low, high, CPU)


def of_bytes(data: bytes | bytearray, name: str) -> Memory:
    """Returns the memory of a byte string; never tied by address, as it is restored as a copy."""
    memory = of_array(np.frombuffer(data, np.uint8), name)
    memory.high = memory.low
    return memory


def _array_remedy(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.names is not None:
        return "save its fields as arrays of their own, {name: array[name] for name in …}"
    if array.dtype.hasobject:
        return "its elements are Python objects; save array.tolist() or a numeric array"
    return "convert it with .astype(…) first"


def of_tensor(tensor: torch.Tensor, name: str) -> Memory:
    """Returns the memory of a tensor on any device."""
    strided, dtype_names = _torch_facts()
    if tensor.layout is not strided:
        raise _refusal(tensor, name)
    known = dtype_names.get(tensor.dtype)
    is_cpu = tensor.is_cpu
    if known is None or (not is_cpu and tensor.device.type == "meta"):
        raise _refusal(tensor, name)
    dtype, item_bytes = known
    try:
        shape = tensor.shape
        address = tensor.data_ptr()
    except RuntimeError as error:
        if tensor.is_nested:
            raise _refusal(tensor, name) from error
        if not is_cpu:
            return _without_address(tensor, dtype, item_bytes)
        raise UnsupportedStateError(
            f"{name}: this tensor has no memory of its own ({error}): save a plain tensor instead",
            key=name,
        ) from error
    if tensor.is_neg() or tensor.is_conj():
        # The elements in memory are not the tensor's values, so it cannot be tied to a view.
        plain = of_tensor(tensor.detach().resolve_conj().resolve_neg(), name)
        plain.high = plain.low
        return plain
    if tensor.is_contiguous():
        strides, low, high = None, address, address + tensor.numel() * item_bytes
    else:
        strides = tuple([stride * item_bytes for stride in tensor.stride()])
        low, high = _span(address, shape, strides, item_bytes)
    if is_cpu:
        end_bytes = tensor.storage_offset() * item_bytes + high - low
        if high > low and (address == 0 or end_bytes > tensor.untyped_storage().nbytes()):
            raise _freed(name)
        return Memory(tensor, dtype, item_bytes, shape, strides, address, low, high, CPU)
    if address == 0:
        return _without_address(tensor, dtype, item_bytes)
    device = str(tensor.device)
    return Memory(tensor, dtype, item_bytes, shape, strides, address, low, high, device)


def check_strided(tensor: torch.Tensor, name: str) -> None:
    """Refuses a tensor without plain strided memory: sparse, nested, meta or quantized."""
    strided, dtype_names = _torch_facts()
    is_plain = tensor.layout is strided and not tensor.is_nested and not tensor.is_meta
    if not is_plain or tensor.dtype not in dtype_names:
        raise _refusal(tensor, name)


def _without_address(tensor: torch.Tensor, dtype: str, item_bytes: int) -> Memory:
    """Returns a memory without an address, which some devices hide; tied by identity alone."""
    device = str(tensor.device)
    return Memory(tensor, dtype, item_bytes, tensor.shape, None, 0, 0, 0, device)


@functools.cache
def _torch_facts() -> tuple[torch.layout, dict[torch.dtype, tuple[str, int]]]:
    # Cached: an import statement per tensor would be measurable.
    return dtypes.import_torch().strided, dtypes.torch_names()


def _freed(name: str) -> UnsupportedStateError:
    """Returns the error for a storage that was resized below its tensor, as FSDP does."""
    return UnsupportedStateError(
        f"{name}: the tensor's storage holds less than its shape takes (freed or resized): "
        "gather or materialize it before saving",
        key=name,
    )


def _refusal(tensor: torch.Tensor, name: str) -> UnsupportedStateError:
    if tensor.is_nested:
        kind, remedy = "nested", "it has no plain memory; give the list from .unbind()"
    elif tensor.device.type == "meta":
        kind, remedy = "meta", "it has no data: materialize it first, as with .to_empty(…)"
    elif tensor.is_quantized:
        kind, remedy = "quantized", "save .int_repr() with its scale and zero point instead"
    elif str(tensor.layout).startswith("torch.sparse"):
        kind, remedy = "sparse", "it has no plain memory; give .to_dense()"
    else:
        kind = f"{str(tensor.layout).removeprefix('torch.')} {tensor.dtype}"
        remedy = "convert it to a plain strided tensor first"
    return UnsupportedStateError(f"{name}: a {kind} tensor cannot be stored: {remedy}", key=name)


def _span(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> tuple[int, int]:
    """Returns the address of the first byte of any element and the address after the last byte."""
    if 0 in shape:
        return address, address
    low = high = address
    for dim, stride in zip(shape, strides, strict=True):
        reach = (dim - 1) * stride
        if reach < 0:
            low += reach
        else:
            high += reach
    return low, high + item_bytes


def narrow(memory: Memory, at: Sequence[int], shape: tuple[int, ...]) -> Memory:
    """Returns a block of a memory that has an address.

    Args:
        memory: The whole memory.
        at: Index of the block's first element.
        shape: The sizes of the block.
    """
    if shape == memory.shape:
        return memory
    strides = memory.strides or contiguous_strides(memory.shape, memory.item_bytes)
    address = memory.address + sum(
        index * stride for index, stride in zip(at, strides, strict=True)
    )
    is_contiguous = all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(
            shape, strides, contiguous_strides(shape, memory.item_bytes), strict=True
        )
    )
    return Memory(
        memory.owner,
        memory.dtype,
        memory.item_bytes,
        shape,
        None if is_contiguous else strides,
        address,
        memory.low,
        memory.high,
        memory.device,
    )


def to_source(
    memory: Memory,
    name: str,
    box: tuple[str, tuple[int, ...], tuple[int, ...]] | None = None,
    places: CurrentStreams | None = None,
) -> TensorSource:
    """Returns a tensor in the form that the native module reads.

    A tensor on a device without a driver is copied to the host here.

    Args:
        memory: The elements; on a device, all elements of its owner unless they are contiguous.
        name: The tensor's name in the part.
        box: Its place in a global tensor, if it is a box: the fields of a `GlobalBox`.
        places: Those of the call that this is for, where it has several tensors.
    """
    place = None
    if memory.device != CPU:
        places = places or CurrentStreams()
        place = None if is_scattered(memory) else places.of(memory)
        if place is None:
            memory = of_tensor(memory.owner.detach().to(CPU), name)
    return TensorSource(
        name,
        memory.dtype,
        memory.shape,
        memory.address,
        memory.strides,
        memory.item_bytes,
        memory.owner,
        None if box is None else GlobalBox(*box),
        place,
    )


def contiguous_strides(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Returns row-major strides, in the unit of ``item_bytes``."""
    strides = []
    for dim in reversed(shape):
        strides.append(item_bytes)
        item_bytes *= max(dim, 1)
    return tuple(reversed(strides))


def foreign_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Returns an array over the memory of an object with DLPack or the buffer protocol, or None."""
    torch = sys.modules.get("torch")
    if isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor)):
        return None
    if isinstance(value, bytes | bytearray | str | type):
        return None
    if hasattr(value, "__dlpack__"):
        for convert in (np.from_dlpack, np.asarray):
            # The second handles cases that the first refuses: device memory, and types that DLPack
            # or NumPy lacks (bfloat16). Producers raise errors of different types.
            with contextlib.suppress(Exception):
                array = convert(value)
                return array if type(array) is np.ndarray and not array.dtype.hasobject else None
        return None
    try:
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, NotImplementedError):
        return None
