"""Named tuples for the native module: tensors to store or link, and memory to fill.

The native module reads each as a plain tuple. Most have the fields ``address``, the address of the
first item; ``strides``, in bytes, or None if the items are contiguous in C order; and ``owner``, an
object that keeps the memory alive while the native module uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from penstock._native import BlockSealer, FileSeal
    from penstock.tensors.devices import DeviceStream

__all__ = [
    "DeviceTarget",
    "Fill",
    "GlobalBox",
    "Grouped",
    "Linked",
    "LinkedFile",
    "LinkedTensor",
    "LoadTarget",
    "NativeArray",
    "TensorSource",
    "TensorTarget",
]


class GlobalBox(NamedTuple):
    """A box of a global tensor.

    Attributes:
        tensor: Name of the global tensor.
        shape: Shape of the global tensor.
        start: Index of the box's first element.
    """

    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


class TensorSource(NamedTuple):
    """A tensor to store.

    Attributes:
        name: Its name in the part.
        dtype: Name of its element type.
        shape: Its dimensions.
        address: Address of its first item.
        strides: Bytes between neighbours along each dimension; None if C-contiguous.
        item_bytes: Bytes of an item.
        owner: The object that owns the memory.
        box: Its place in a global tensor, if it is a box.
        device: The device that has the memory; None for the host.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    strides: tuple[int, ...] | None
    item_bytes: int
    owner: object
    box: GlobalBox | None
    device: DeviceStream | None


class LinkedFile(NamedTuple):
    """A file of tensors that a save links to.

    Attributes:
        path: Its path.
        nbytes: Its size.
        chunks: Digests of its chunks.
        owner: The object that keeps the file.
        sealer: Its key, if it is sealed by blocks or by chunks.
    """

    path: str
    nbytes: int
    chunks: list[int]
    owner: object
    sealer: BlockSealer | FileSeal | None = None


class LinkedTensor(NamedTuple):
    """A tensor in a linked file.

    Attributes:
        name: Its name in the part.
        dtype: Name of its element type.
        shape: Its dimensions.
        item_bytes: Bytes of an item.
        file: Index of its file.
        offset: Its first byte in the file.
        stored_name: Its name in the header of the file.
        box: Its place in a global tensor, if it is a box.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    file: int
    offset: int
    stored_name: str
    box: GlobalBox | None


class Linked(NamedTuple):
    """Files that a save links to, and the tensors in them.

    Attributes:
        files: Each file once.
        tensors: The tensors, counted after those that are written.
    """

    files: list[LinkedFile]
    tensors: list[LinkedTensor]


class Grouped(NamedTuple):
    """A tensor of a group.

    Attributes:
        tensor: Its index among the tensors of the part.
        group: Name of the group.
        name: Its name in the group's shards.
    """

    tensor: int
    group: str
    name: str


class TensorTarget(NamedTuple):
    """C-contiguous memory of the host to fill.

    Attributes:
        address: Address of its first byte.
        nbytes: Its size.
        owner: The object that owns it.
    """

    address: int
    nbytes: int
    owner: object


class DeviceTarget(NamedTuple):
    """Memory of a device to fill with a whole tensor.

    Attributes:
        shape: Its dimensions.
        address: Address of its first item.
        strides: Bytes between neighbours along each dimension; None if C-contiguous.
        item_bytes: Bytes of an item.
        owner: The object that owns it.
        device: The device that has it.
    """

    shape: tuple[int, ...]
    address: int
    strides: tuple[int, ...] | None
    item_bytes: int
    owner: object
    device: DeviceStream


LoadTarget: TypeAlias = TensorTarget | DeviceTarget
"""Memory to fill with a whole tensor."""


class Fill(NamedTuple):
    """Memory to fill with a box of a stored tensor.

    Attributes:
        tensor: Name of the global tensor, or index of the entry.
        start: Index of the box's first element.
        shape: Dimensions of the box.
        address: Address of its first item in memory.
        strides: Bytes between neighbours along each dimension; None if C-contiguous.
        item_bytes: Bytes of an item.
        owner: The object that owns the memory.
        device: The device that has the memory; None for the host.
    """

    tensor: str | int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    address: int
    strides: tuple[int, ...] | None
    item_bytes: int
    owner: object
    device: DeviceStream | None


class NativeArray(NamedTuple):
    """Items to read or to write, as they are in memory.

    Attributes:
        address: Address of the first item.
        shape: Dimensions.
        strides: Bytes between neighbours along each dimension; None if C-contiguous.
        item_bytes: Bytes of an item.
        owner: The object that owns the memory.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    item_bytes: int
    owner: object

    @classmethod
    def of_bytes(cls, address: int, nbytes: int, owner: object) -> NativeArray:
        """Contiguous bytes.

        Args:
            address: Address of the first one.
            nbytes: Their number.
            owner: The object that owns them.
        """
        return cls(address, (nbytes,), None, 1, owner)
