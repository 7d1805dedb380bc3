"""The transfers that one call of a `TensorIO` requests, for host and device tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.io.arrays import memory_of, native_of, refusal, to_read_into
from penstock.tensors.devices import CurrentStreams, is_scattered
from penstock.tensors.dtypes import import_torch
from penstock.tensors.memory import CPU

if TYPE_CHECKING:
    from penstock.tensors.devices import DeviceStream
    from penstock.tensors.memory import Memory
    from penstock.tensors.native_rows import NativeArray


class TransferRequests:
    """The requested transfers of one call, all in one direction.

    Attributes:
        of_host: File, offset and array of each transfer from or to host memory.
        on_devices: File, offset, array and place of each transfer whose device copies by its
            driver.
        copies: Device tensors that PyTorch fills after all reads, each with its source on the host.
    """

    def __init__(self) -> None:
        self.of_host: list[tuple[_native.DataFile, int, NativeArray]] = []
        self.on_devices: list[tuple[_native.DataFile, int, NativeArray, DeviceStream]] = []
        self.copies: list[tuple[Any, Any]] = []
        self._places = CurrentStreams()

    def read(self, tensor: Any, file: _native.DataFile, offset: int) -> None:
        """Adds a tensor to be filled."""
        memory = memory_of(tensor)
        array = to_read_into(tensor, memory)
        if memory.device == CPU:
            self.of_host.append((file, offset, array))
            return
        place = self._place(memory)
        if place is not None:
            self.on_devices.append((file, offset, array, place))
            return
        if any(
            not step and size > 1
            for size, step in zip(memory.shape, memory.strides or memory.shape, strict=True)
        ):
            raise refusal("its items lie in each other: use a contiguous one")
        host = import_torch().empty(tensor.shape, dtype=tensor.dtype, device=CPU)
        self.of_host.append((file, offset, to_read_into(host, memory_of(host))))
        self.copies.append((tensor, host))

    def write(self, tensor: Any, file: _native.DataFile, offset: int) -> None:
        """Adds a tensor to be written."""
        memory = memory_of(tensor)
        place = None
        if memory.device != CPU:
            place = self._place(memory)
            if place is None:
                memory = memory_of(memory.owner.detach().to(CPU))
        array = native_of(memory)
        if place is None:
            self.of_host.append((file, offset, array))
        else:
            self.on_devices.append((file, offset, array, place))

    def _place(self, memory: Memory) -> DeviceStream | None:
        """Returns where a driver can copy a memory; None if PyTorch has to copy it."""
        place = self._places.of(memory)
        if place is None or not is_scattered(memory):
            return place
        # PyTorch's copy would break a stream capture.
        _native.check_stream(place)
        return None
