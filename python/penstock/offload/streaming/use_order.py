"""`Uses`: when kernels have used memory of a device that is filled anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import _native
from penstock.tensors.devices import DirectPlaces, check_known

if TYPE_CHECKING:
    import torch

    from penstock.tensors.devices import Place


class Uses:
    """Has what is read into memory of a device come after the kernels that used it.

    Args:
        device: The device; None for the host, of which nothing is noted.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._last: dict[Place, _native.Moment | None] = {}

    @property
    def place(self) -> Place | None:
        """The device with its current stream; None where no driver is asked.

        Raises:
            DeviceError: That is one which the native module does not reach, or this is a fork of a
                process that has used CUDA.
        """
        if self._device is None:
            return None
        place = DirectPlaces().on(str(self._device))
        check_known(self._device, place)
        return place

    def check(self) -> None:
        """That the current stream is not being captured into a graph.

        Raises:
            DeviceError: It is, or this is a fork of a process that has used CUDA.
        """
        if (place := self.place) is not None:
            _native.check_stream(place)

    def note(self) -> tuple[Place, _native.Moment] | None:
        """Kernels that use the memory are queued on the current stream.

        Returns:
            The stream, and the moment when they are done.

        Raises:
            DeviceError: The driver fails.
        """
        return None if (place := self.place) is None else (place, self.note_on(place))

    def note_on(self, place: Place) -> _native.Moment:
        """Kernels that use the memory are queued on a stream.

        Args:
            place: The device with the stream.

        Returns:
            The moment when they are done.

        Raises:
            DeviceError: The driver fails.
        """
        # Where it does, whoever reads next has to wait for a later moment.
        self._last[place] = None
        moment = self._last[place] = _native.Moment(place)
        return moment

    def wait_for(self, place: Place, moment: _native.Moment) -> bool:
        """Has the current stream wait for a moment of a stream, if it is another one.

        Returns:
            Whether it has come, so that nobody has to wait for it any more.

        Raises:
            DeviceError: The driver fails, or the current stream is captured into a graph.
        """
        if moment.done():
            return True
        current = self.place
        if current is not None and current != place:
            moment.before_work(current)
        return False

    def follow(self) -> None:
        """Something is about to be read.

        Raises:
            DeviceError: The driver fails.
        """
        while self._last:
            place, moment = next(iter(self._last.items()))
            (moment or _native.Moment(place)).before_fills()
            del self._last[place]
