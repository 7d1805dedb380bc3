"""`Landing`: where the batches of an epoch go, and on which stream."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from penstock.tensors.devices import open_place

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Landing:
    """A device that batches go to; made by the thread that begins the epoch.

    Rows are asked for ahead by another thread, which has another current stream: it takes that of
    this one. So rows come into memory of the stream that they are used on, and after what it has.

    Args:
        device: Where batches are to be; one without a number is the one that is current here.

    Attributes:
        device: The same, with its number.
        rows: Where rows are gathered to ahead: there, or on the host where PyTorch has to copy
            them.

    Raises:
        DeviceError: The current stream of the device is being captured, its driver fails, or this
            is a fork of a process that has used it.
    """

    def __init__(self, device: torch.device) -> None:
        place = open_place(device)
        self.device = device
        self.rows: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        if place is not None:
            self.device = self.rows = torch.device("cuda", place[0])
            self._stream = torch.cuda.current_stream(place[0])

    def check(self) -> None:
        """Whether a batch can come to the stream that is current here.

        Raises:
            DeviceError: The stream is being captured, or the driver fails.
        """
        open_place(self.device)

    def working(self) -> AbstractContextManager[Any]:
        """Has another thread work on the stream that the epoch began on."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def moved(self, batch: Any) -> Any:
        """A batch, all of whose tensors are on the device for the current stream."""
        return batch.apply(self._moved)

    def _moved(self, value: Any) -> Any:
        has_driver = self._stream is not None
        if has_driver and isinstance(value, torch.Tensor) and value.device.type == "cpu":
            # Of other memory the driver may have this thread wait for all that the stream has.
            # Where none can be pinned, copies are slower.
            with contextlib.suppress(RuntimeError):
                value = value.pin_memory()
        return value.to(device=self.device, non_blocking=has_driver)
