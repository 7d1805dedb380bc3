"""`DeviceTensors`: new tensors of devices, for what is stored, and how they are filled.

PyTorch allocates them, as it knows what of a device is free, and the native module fills them where
they are: what is read is verified in host memory that is as small as for any load, and copied by
the device from there. So it is only where the native module has a driver.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.state.references import DATA_TAGS, needed
from penstock.tensors import dtypes

if TYPE_CHECKING:
    import torch

    from penstock._native import _Fill, _Target
    from penstock.checkpoint.view.view import View
    from penstock.tensors.devices import DirectPlaces, Place


class DeviceTensors:
    """New tensors of devices.

    Args:
        seen: The view of a checkpoint that indices belong to.
        places: Of the call that they are for.

    Attributes:
        made: The tensors by index.
    """

    def __init__(self, seen: View, places: DirectPlaces) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self._seen = seen
        self._places = places

    def make_all(self, device: Any) -> None:
        """Makes those of all that the tree has as tensors, and as nothing else.

        An array stays on the host, and what is one and a tensor as well is read there.

        Args:
            device: Where they shall be.

        Raises:
            TreeError: The tree is malformed.
            DeviceError: This is a fork of a process that has used CUDA.
        """
        if self._places.on(str(device)) is None:
            return
        node, tensors, aliases, *_ = self._seen
        on_host = needed(node, tensors, aliases, DATA_TAGS - {"tensor"})
        in_tensors = needed(node, tensors, aliases, frozenset({"tensor"}))
        with self:
            for index in sorted(set(in_tensors).difference(on_host)):
                self.make(index, device)

    def make(self, index: int, device: Any) -> None:
        """Makes one, unless it has no bytes or no type of PyTorch's: who builds it sees to that."""
        _, name, shape, _, begin, end = self._seen.tensors[index]
        dtype = dtypes.torch_dtypes().get(name)
        if begin < end and dtype is not None:
            empty = sys.modules["torch"].empty
            self.made[index] = empty(shape, dtype=dtype, device=device)

    def native(self) -> dict[int, _Target]:
        """What the native module fills with entries, by their indices."""
        return {
            index: ((tensor.numel(),), *self._memory(tensor))
            for index, tensor in self.made.items()
            if index not in self._seen.wholes
        }

    def requests(self) -> list[_Fill]:
        """What it fills with tensors that are put together from boxes."""
        found: list[_Fill] = []
        for index, tensor in self.made.items():
            name = self._seen.wholes.get(index)
            if name is not None:
                shape = self._seen.tensors[index][2]
                found.append((name, (0,) * len(shape), shape, *self._memory(tensor)))
        return found

    def __enter__(self) -> DeviceTensors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Gives the memory back where nothing becomes of it: an error may be kept for long."""
        if error is not None:
            self.made.clear()

    def _memory(self, tensor: torch.Tensor) -> tuple[int, None, int, torch.Tensor, Place]:
        place = self._places.on(str(tensor.device))
        assert place is not None, "they are made where there is one"
        return tensor.data_ptr(), None, tensor.itemsize, tensor, place
