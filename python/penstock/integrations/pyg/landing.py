"""`Landing`: the device and the stream of an epoch's batches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from penstock.tensors.devices import open_stream

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Landing:
    """A device for batches; made by the thread that begins the epoch.

    Rows are gathered ahead by another thread, which has another current stream; it uses the stream
    of this one. So rows are written to memory of the stream that uses them, after its earlier work.

    Attributes:
        device: The device with its index.
        rows: Where rows are gathered ahead: on that device, or None for the host if PyTorch has to
            copy them.
    """

    def __init__(self, device: torch.device) -> None:
        place = open_stream(device)
        self.device = device
        self.rows: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        if place is not None:
            self.device = self.rows = torch.device("cuda", place.ordinal)
            self._stream = torch.cuda.current_stream(place.ordinal)

    def check(self) -> None:
        """Raises `DeviceError` if the current stream is being captured, or the driver fails."""
        open_stream(self.device)

    def working(self) -> AbstractContextManager[Any]:
        """Makes another thread use the stream on which the epoch began, within the context."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def moved(self, batch: Any) -> Any:
        """The batch with all tensors on the device, ready for the current stream."""
        return batch.apply(self._moved)

    def _moved(self, value: Any) -> Any:
        has_driver = self._stream is not None
        if has_driver and isinstance(value, torch.Tensor) and value.device.type == "cpu":
            # For pageable memory the driver may make this thread wait for the whole stream. If none
            # can be pinned, copies are slower.
            with contextlib.suppress(RuntimeError):
                value = value.pin_memory()
        return value.to(device=self.device, non_blocking=has_driver)
