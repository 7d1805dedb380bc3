"""`Delivery`: rows of a table that changes, on their way to a device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.features.rows import Rows
from penstock.tensors import dtypes
from penstock.tensors.devices import open_place, pinned

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from penstock.features.columns import Columns
    from penstock.features.results import Results
    from penstock.tensors.devices import Place


class Delivery:
    """Rows that come to memory of the host, and go on to a device by one copy of PyTorch's.

    The copy is queued on the stream that is current where the rows are asked for first. Where
    there is a driver, the memory is pinned, and no thread waits for the copy.

    Args:
        columns: What a row is made of.
        results: Makes memory where none can be pinned.
        shape: Of the rows, in bytes.
        device: Where they are to be.

    Attributes:
        rows: The rows: those of the host until they are on the device.

    Raises:
        DeviceError: The stream of the device is being captured, its driver fails, or this is a
            fork of a process that has used it.
        StorageError: The system has no memory for them.
    """

    def __init__(
        self, columns: Columns, results: Results, shape: Sequence[int], device: torch.device
    ) -> None:
        place = open_place(device)
        # A device without a number is the one that is current here.
        self._device = device if place is None else dtypes.import_torch().device("cuda", place[0])
        self._host: Any = None if place is None else pinned(shape, dtypes.import_torch().uint8)
        self._is_pinned = self._host is not None
        if self._host is None:
            self._host = results.empty(shape, is_torch=True)
        self.rows = Rows(columns, self._host)
        self._turn = threading.Lock()
        self._copied: tuple[Place, _native.Moment] | None = None

    def finish(self) -> None:
        """Has the current stream get the rows, which the host has by now.

        Raises:
            DeviceError: The stream is being captured, or the driver fails.
        """
        place = open_place(self._device)
        # Once, whoever asks for it how often.
        with self._turn:
            if self._host is not None:
                self._copy(place)
                return
            if self._copied is None or self._copied[0] == place:
                return
            if place is None:
                # The current stream is one that nobody can tell to wait.
                self._copied[1].wait()
                return
            self._copied[1].before_work(place)
            # It is the other one's, which gets it back when this one is done with it.
            current = dtypes.import_torch().cuda.current_stream(place[0])
            self.rows.buffer.record_stream(current)

    def _copy(self, place: Place | None) -> None:
        # Of pinned memory PyTorch itself knows when it is copied.
        is_queued = self._is_pinned and place is not None
        arrived = self._host.to(device=self._device, non_blocking=is_queued)
        if place is not None:
            self._copied = place, _native.Moment(place)
        self.rows.buffer, self._host = arrived, None
