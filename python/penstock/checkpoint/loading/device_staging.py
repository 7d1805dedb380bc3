"""`Passing`: stored tensors that come to their targets through other memory of the same device.

The native module fills contiguous memory of the device, and PyTorch copies from there to where
elements lie scattered. A device has less memory than the host, and most of it in use: there is so
much of this at a time.
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
    from penstock.tensors.devices import DirectPlaces

PASSING_BYTES = 256 << 20
"""Memory that a device has for it at a time, beside one tensor that is larger.

PyTorch takes as much as such a tensor has in any case, wherever it copies from.
"""


class Passing:
    """What goes through other memory of devices.

    Args:
        seen: The view of the checkpoint that indices belong to.
        places: Of the call.
        devices: Where each tensor's elements go, by its index.

    Attributes:
        memory: What is read into next; empty before `take`.
    """

    def __init__(self, seen: View, places: DirectPlaces, devices: Mapping[int, Any]) -> None:
        self.memory = DeviceTensors(seen, places)
        self._seen = seen
        self._devices = devices
        self._batches = self._cut()

    @property
    def is_in_parts(self) -> bool:
        """Whether there is more of it than is read with all else."""
        return len(self._batches) > 1

    def entries(self) -> set[int]:
        """What is read with all else, and not put together from boxes."""
        return {index for batch in self._batches[:1] for index in batch} - self._seen.wholes.keys()

    def take(self) -> DeviceTensors:
        """Takes memory for what is read with all else."""
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

        Args:
            checkpoint: The checkpoint, open.
            copy: Puts tensors to their places: called with their indices and what builds them, and
                windows of them, in memory of the device that is given back afterwards.
            options: How bytes move.
            progress: Called with the bytes done and in all, anew for each part.

        Returns:
            What is to be reported of what it read.

        Raises:
            CorruptCheckpointError: Something is damaged.
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
        """Parts, in the order in which it is stored."""
        batches: list[list[int]] = []
        room = 0
        for index in sorted(self._devices):
            *_, begin, end = self._seen.tensors[index]
            if end - begin > room:
                batches.append([])
                room = max(PASSING_BYTES, end - begin)
            batches[-1].append(index)
            room -= end - begin
        return batches

    def _make(self, batch: list[int]) -> None:
        for index in batch:
            self.memory.make(index, self._devices[index])
