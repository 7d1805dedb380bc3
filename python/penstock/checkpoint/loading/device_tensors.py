"""`DeviceTensors`: new device tensors, filled from a checkpoint.

PyTorch allocates them, because it knows a device's free memory, and the native module fills them in
place: bytes are verified in a small host buffer, as for any load, and the device copies them from
there. This requires a driver in the native module.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.state.references import DATA_TAGS, needed
from penstock.tensors import dtypes
from penstock.tensors.native_rows import DeviceTarget, Fill

if TYPE_CHECKING:
    import torch

    from penstock.checkpoint.view.view import View
    from penstock.tensors.devices import CurrentStreams, DeviceStream
    from penstock.tensors.native_rows import LoadTarget


class DeviceTensors:
    """New tensors on devices.

    Args:
        seen: The view of the checkpoint to which indices refer.
        places: The cached device streams of the call.

    Attributes:
        made: The tensors by index.
    """

    def __init__(self, seen: View, places: CurrentStreams) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self._seen = seen
        self._places = places

    def make_all(self, device: Any) -> None:
        """Allocates all tensors that the tree holds only as tensors.

        Arrays stay on the host, and an entry that is both an array and a tensor is read there.

        Args:
            device: The device of the tensors.
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
        """Allocates a tensor, unless it has no bytes or no type of PyTorch; the builder copes."""
        entry = self._seen.tensors[index]
        dtype = dtypes.torch_dtypes().get(entry.dtype)
        if entry.begin < entry.end and dtype is not None:
            empty = sys.modules["torch"].empty
            self.made[index] = empty(entry.shape, dtype=dtype, device=device)

    def native(self) -> dict[int, LoadTarget]:
        """Returns the memory that the native module fills with entries, by index."""
        return {
            index: DeviceTarget((tensor.numel(),), *self._memory(tensor))
            for index, tensor in self.made.items()
            if index not in self._seen.wholes
        }

    def requests(self) -> list[Fill]:
        """Returns the requests for tensors that the native module assembles from boxes."""
        found: list[Fill] = []
        for index, tensor in self.made.items():
            name = self._seen.wholes.get(index)
            if name is not None:
                shape = self._seen.tensors[index].shape
                found.append(Fill(name, (0,) * len(shape), shape, *self._memory(tensor)))
        return found

    def __enter__(self) -> DeviceTensors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Releases the memory if the load fails: an error may be kept for long."""
        if error is not None:
            self.made.clear()

    def _memory(self, tensor: torch.Tensor) -> tuple[int, None, int, torch.Tensor, DeviceStream]:
        place = self._places.on(str(tensor.device))
        assert place is not None, "they are made where there is one"
        return tensor.data_ptr(), None, tensor.itemsize, tensor, place
