"""`Target`: a tensor or array that ``load(into=…)`` fills; and the marker `NEW`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.layout.boxes import Box
from penstock.tensors.marks import PerRank
from penstock.tensors.memory import CPU, Memory, contiguous_strides, narrow
from penstock.tensors.native_rows import DeviceTarget, Fill, TensorTarget

if TYPE_CHECKING:
    from penstock.checkpoint.state.tree.references import Window
    from penstock.checkpoint.state.tree.tree import Node
    from penstock.tensors.devices import DeviceStream
    from penstock.tensors.native_rows import LoadTarget


class _New:
    """Marks a place in a state where a load builds a new value of any kind."""

    def __repr__(self) -> str:
        return "NEW"


NEW = _New()


@dataclass(slots=True)
class Target:
    """A tensor or array to fill.

    Attributes:
        name: Its dotted name.
        value: The tensor or array itself.
        memory: The memory of its elements; of a `DTensor`, that of its local tensor.
        node: The leaf of the checkpoint's tree.
        index: The stored tensor of that leaf.
        window: The part of the stored tensor; None for the whole.
        boxes: The boxes that this rank holds of a `DTensor`; None for a plain tensor.
        place: The device place that the native module fills; None for host memory, or if PyTorch
            has to copy it.
    """

    name: str
    value: Any
    memory: Memory
    node: dict[str, Node]
    index: int
    window: Window | None
    boxes: list[Box] | None
    place: DeviceStream | None

    def native(self) -> LoadTarget:
        """Returns the memory that the native module fills with an entry."""
        memory = self.memory
        if self.place is None:
            return TensorTarget(memory.address, memory.nbytes, self.value)
        layout = (memory.shape, memory.address, memory.strides, memory.item_bytes)
        return DeviceTarget(*layout, memory.owner, self.place)

    def requests(self, key: str | int, memory: Memory) -> list[Fill]:
        """Returns the boxes of the tensor ``key`` for the native module, with their memory."""
        zeros = (0,) * len(memory.shape)
        boxes = [Box(zeros, memory.shape, zeros)] if self.boxes is None else self.boxes
        device = None if memory.device == CPU else self.place
        found: list[Fill] = []
        for box in boxes:
            part = narrow(memory, box.at, box.shape)
            place = (part.address, part.strides, part.item_bytes, part.owner, device)
            found.append(Fill(key, box.start, box.shape, *place))
        return found

    @property
    def held(self) -> tuple[Any, ...]:
        """A key of a `DTensor`: the stored tensor, and the boxes that this rank holds."""
        return (self.index, self.memory.shape, *(self.boxes or ()))

    @property
    def claim(self) -> tuple[Any, ...]:
        """A key; two targets may share memory only if their keys are equal.

        It consists of the stored tensor and the address of its first element.
        """
        memory = self.memory
        if self.boxes is not None:
            boxes = tuple(self.boxes)
            return (self.index, memory.device, memory.address, memory.strides, boxes, self.window)
        if self.window is None:
            return (self.index, memory.device, memory.address, memory.strides)
        shape, strides, offset = self.window
        item_bytes = memory.item_bytes
        own = memory.strides or contiguous_strides(memory.shape, item_bytes)
        for dim, stride, own_stride in zip(shape, strides, own, strict=True):
            if dim > 1 and stride * item_bytes != own_stride:
                return (self.index, memory.device, memory.address, own, self.window)
        return (self.index, memory.device, memory.address - offset * item_bytes, None)


def is_sharded(value: Any) -> bool:
    """Whether a value is a `DTensor`, of which this rank holds a part."""
    # No `DTensor` exists before the module is imported, which takes a while.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is module.DTensor


def local_of(value: Any) -> Any:
    """Returns a rank's part of a `DTensor`, without autograd."""
    return value.detach().to_local()


def unwrapped(value: Any) -> Any:
    """Removes the per-rank mark from a value, which may be filled with or without it."""
    while isinstance(value, PerRank):
        value = value.value
    return value
