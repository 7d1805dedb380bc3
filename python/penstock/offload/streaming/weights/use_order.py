"""`UseOrder`: orders refills of device memory after the kernels that use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import _native
from penstock.tensors.devices import CurrentStreams, check_known

if TYPE_CHECKING:
    import torch

    from penstock.tensors.devices import DeviceStream


class UseOrder:
    """Orders refills of a device's memory after the kernels that have used it."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._last: dict[DeviceStream, _native.Moment | None] = {}

    @property
    def place(self) -> DeviceStream | None:
        """The device with its current stream; None for the host."""
        if self._device is None:
            return None
        place = CurrentStreams().on(str(self._device))
        check_known(self._device, place)
        return place

    def check(self) -> None:
        """Raises `DeviceError` while the stream is captured, and in a fork of a CUDA process."""
        if (place := self.place) is not None:
            _native.check_stream(place)

    def record(self) -> tuple[DeviceStream, _native.Moment] | None:
        """Notes that kernels using the memory are queued on the current stream.

        Returns:
            The stream, and the moment when they are done; None for the host.
        """
        return None if (place := self.place) is None else (place, self.record_on(place))

    def record_on(self, place: DeviceStream) -> _native.Moment:
        """Notes that kernels using the memory are queued on a stream.

        Returns:
            The moment when they are done.
        """
        # If the driver fails here, `follow` takes a later moment.
        self._last[place] = None
        moment = self._last[place] = _native.Moment(place)
        return moment

    def wait_for(self, place: DeviceStream, moment: _native.Moment) -> bool:
        """Makes the current stream wait for a moment of another stream.

        Returns:
            Whether the moment has passed, so that later callers need not wait.
        """
        if moment.done():
            return True
        current = self.place
        if current is not None and current != place:
            moment.before_work(current)
        return False

    def follow(self) -> None:
        """Makes the next fills of the memory wait for all noted kernels."""
        while self._last:
            place, moment = next(iter(self._last.items()))
            (moment or _native.Moment(place)).before_fills()
            del self._last[place]
