"""`Uses`: the streams of a device that have used memory which is filled anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.state.devices import DirectPlaces
from penstock.state.memory import of_tensor

if TYPE_CHECKING:
    from penstock.state.devices import Place


class Uses:
    """Has what is read into memory of a device come after the kernels that used it.

    What is read comes after what the current stream has at the call; here are the other streams.
    """

    def __init__(self) -> None:
        self._streams: set[Place] = set()

    def end(self, memory: Any) -> None:
        """A use on the current stream is over: its kernels are queued."""
        if (place := DirectPlaces().of(of_tensor(memory, "weights"))) is not None:
            self._streams.add(place)

    def follow(self, memory: Any) -> None:
        """Something is about to be read on the current stream.

        Raises:
            DeviceError: The driver fails.
        """
        if not self._streams:
            return
        place = DirectPlaces().of(of_tensor(memory, "weights"))
        others = [one for one in self._streams if one != place]
        if others:
            _native.fill_after(others)
            # The current one counts again where another one reads next: what is read here may be
            # given up, and then nothing has come after it.
            self._streams.difference_update(others)
