"""`DeviceCopy`: copies looked-up rows of a `Table` to a device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.features.rows import Rows
from penstock.tensors import dtypes
from penstock.tensors.devices import open_stream, pinned

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from penstock.features.columns import Columns
    from penstock.features.gathering.results import Results
    from penstock.tensors.devices import DeviceStream


class DeviceCopy:
    """Rows read into host memory and then copied to a device by one PyTorch copy.

    The copy is queued on the stream that is current when `finish` is first called. With a CUDA
    driver the host memory is pinned, and no thread waits for the copy.

    Attributes:
        rows: The rows: on the host until `finish` has queued the copy, then on the device.
    """

    def __init__(
        self, columns: Columns, results: Results, shape: Sequence[int], device: torch.device
    ) -> None:
        place = open_stream(device)
        # A device without an index is PyTorch's current device.
        self._device = (
            device if place is None else dtypes.import_torch().device("cuda", place.ordinal)
        )
        self._host: Any = None if place is None else pinned(shape, dtypes.import_torch().uint8)
        self._is_pinned = self._host is not None
        if self._host is None:
            self._host = results.empty(shape, is_torch=True)
        self.rows = Rows(columns, self._host)
        self._turn = threading.Lock()
        self._copied: tuple[DeviceStream, _native.Moment] | None = None

    def finish(self) -> None:
        """Queues the copy to the device, and makes the current stream wait for it.

        Call it once the rows are in host memory; it may be called again, from other streams.
        """
        place = open_stream(self._device)
        # Copies once, however many callers ask.
        with self._turn:
            if self._host is not None:
                self._copy(place)
                return
            if self._copied is None or self._copied[0] == place:
                return
            if place is None:
                # The native module has no handle of the current stream, so the host waits.
                self._copied[1].wait()
                return
            self._copied[1].before_work(place)
            # The memory belongs to the stream of the copy; PyTorch reuses it after this one, too.
            current = dtypes.import_torch().cuda.current_stream(place.ordinal)
            self.rows.buffer.record_stream(current)

    def _copy(self, place: DeviceStream | None) -> None:
        # PyTorch itself keeps pinned memory until a queued copy has read it.
        is_queued = self._is_pinned and place is not None
        arrived = self._host.to(device=self._device, non_blocking=is_queued)
        if place is not None:
            self._copied = place, _native.Moment(place)
        self.rows.buffer, self._host = arrived, None
