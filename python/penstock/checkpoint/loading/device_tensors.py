"""New device tensors that a load fills: values of their own, and memory to copy targets from.

PyTorch allocates them, because it knows a device's free memory, and the native module fills them in
place: bytes are verified in a small host buffer, as for any load, and the device copies them from
there. This requires a driver in the native module. A device has less memory than the host, and most
of it is in use, so the size of memory to copy from is bounded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.fetch import fetch
from penstock.checkpoint.state.build import Builder
from penstock.checkpoint.state.tree.references import DATA_TAGS, needed
from penstock.tensors import dtypes
from penstock.tensors.native_rows import DeviceTarget, Fill

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import torch

    from penstock import _native
    from penstock.checkpoint.view.view import View
    from penstock.common.progress import Progress
    from penstock.tensors.devices import CurrentStreams, DeviceStream
    from penstock.tensors.native_rows import LoadTarget

DEVICE_STAGING_BYTES = 256 << 20
"""Upper bound of the memory in use on a device at a time, apart from a single larger tensor.

PyTorch needs as much memory as such a tensor has in any case, whatever it copies from.
"""


class DeviceTensors:
    """New tensors on devices."""

    def __init__(self, seen: View, places: CurrentStreams) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self._seen = seen
        self._places = places

    def make_all(self, device: Any) -> None:
        """Allocates all tensors that the tree holds only as tensors.

        Arrays stay on the host, and an entry that is both an array and a tensor is read there.
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


class DeviceStaging:
    """Stored tensors that targets are copied from in memory of a device, one batch at a time.

    The native module fills contiguous memory of the device, and PyTorch copies from there.

    Attributes:
        memory: The memory to be filled next; empty before `allocate`.
    """

    def __init__(self, seen: View, places: CurrentStreams, devices: Mapping[int, Any]) -> None:
        self.memory = DeviceTensors(seen, places)
        self._seen = seen
        self._devices = devices
        self._batches = self._cut()

    @property
    def is_in_batches(self) -> bool:
        """Whether more tensors are waiting than are read together with all others."""
        return len(self._batches) > 1

    def entries(self) -> set[int]:
        """Indices of the tensors read with all others, except those assembled from boxes."""
        return {index for batch in self._batches[:1] for index in batch} - self._seen.wholes.keys()

    def allocate(self) -> DeviceTensors:
        """Allocates memory for the tensors that are read together with all others."""
        for batch in self._batches[:1]:
            self._make(batch)
        return self.memory

    def copy_batches(
        self,
        checkpoint: _native.Checkpoint,
        copy: Callable[[Collection[int], Builder], object],
        *,
        options: dict[str, Any],
        progress: Progress | None,
    ) -> list[dict[str, Any]]:
        """Copies all tensors to their targets, reading the remaining batches one after another.

        Args:
            checkpoint: The open checkpoint.
            copy: Copies tensors to their targets. It gets their indices and a builder of them, and
                windows of them, in device memory that is released afterwards.
            options: How bytes move.
            progress: Called with the bytes done and the total bytes, separately for each batch.

        Returns:
            The report fields of each read.
        """
        tensors, aliases = self._seen.tensors, self._seen.aliases
        reports = []
        for number, batch in enumerate(self._batches):
            if number:
                self._make(batch)
                entries = set(batch) - self._seen.wholes.keys()
                fetched = fetch(
                    checkpoint, self._seen, entries, self.memory, options=options, progress=progress
                )
                reports.append(fetched.fields)
            copy(batch, Builder(tensors, aliases, {}, made=self.memory.made))
            self.memory.made.clear()
        return reports

    def _cut(self) -> list[list[int]]:
        """Splits the tensors into batches, in stored order."""
        batches: list[list[int]] = []
        room = 0
        for index in sorted(self._devices):
            entry = self._seen.tensors[index]
            nbytes = entry.end - entry.begin
            if nbytes > room:
                batches.append([])
                room = max(DEVICE_STAGING_BYTES, nbytes)
            batches[-1].append(index)
            room -= nbytes
        return batches

    def _make(self, batch: list[int]) -> None:
        for index in batch:
            self.memory.make(index, self._devices[index])
