"""`DeviceStaging`: fills scattered device tensors through contiguous memory of the same device.

The native module fills contiguous memory of the device, and PyTorch copies from there to the
scattered elements. A device has less memory than the host, and most of it is in use, so the size of
this memory is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.device_tensors import DeviceTensors
from penstock.checkpoint.loading.fetch import fetch
from penstock.checkpoint.state.build import Builder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from penstock import _native
    from penstock.checkpoint.view.view import View
    from penstock.common.progress import Progress
    from penstock.tensors.devices import CurrentStreams

DEVICE_STAGING_BYTES = 256 << 20
"""Upper bound of the memory in use on a device at a time, apart from a single larger tensor.

PyTorch needs as much memory as such a tensor has in any case, whatever it copies from.
"""


class DeviceStaging:
    """The tensors that are filled through other memory of their devices.

    Args:
        seen: The view of the checkpoint to which indices refer.
        places: The cached device streams of the call.
        devices: The device of each tensor, by index.

    Attributes:
        memory: The memory to be filled next; empty before `take`.
    """

    def __init__(self, seen: View, places: CurrentStreams, devices: Mapping[int, Any]) -> None:
        self.memory = DeviceTensors(seen, places)
        self._seen = seen
        self._devices = devices
        self._batches = self._cut()

    @property
    def is_in_parts(self) -> bool:
        """Whether more tensors are waiting than are read together with all others."""
        return len(self._batches) > 1

    def entries(self) -> set[int]:
        """Indices of the tensors read with all others, except those assembled from boxes."""
        return {index for batch in self._batches[:1] for index in batch} - self._seen.wholes.keys()

    def take(self) -> DeviceTensors:
        """Allocates memory for the tensors that are read together with all others."""
        for batch in self._batches[:1]:
            self._make(batch)
        return self.memory

    def pass_on(
        self,
        checkpoint: _native.Checkpoint,
        copy: Callable[[Collection[int], Builder], object],
        *,
        options: dict[str, Any],
        progress: Progress | None,
    ) -> list[dict[str, Any]]:
        """Puts all of it where it belongs; reads what was not read with all else, in parts.

        Copies all tensors to their targets, reading the remaining batches one after another.

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
