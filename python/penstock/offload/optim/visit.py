"""`Visit`: what devices have of parameters comes to the host to be updated, and goes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from penstock import _native
from penstock.state.devices import DirectPlaces

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.offload.optim.shares import Shares
    from penstock.state.devices import Place


class Visit:
    """Elements of parameters, in memory of the host for an update.

    Those of the host are updated where they are. Those of a device are copied by it, behind what
    its current stream has, while others are updated: to pinned memory when this is made, and back
    when they leave. What the stream gets then sees them updated; the host waits for neither.

    Args:
        shares: What is updated; values and gradients of it become those of the host.
        has_masters: Whether values are computed of masters alone, but for the first step.

    Raises:
        DeviceError: The driver fails, or this is a fork of a process that has used the device.
    """

    def __init__(self, shares: dict[tuple[int, bool], Shares], *, has_masters: bool) -> None:
        self._shares = shares
        self._places = DirectPlaces()
        self._values: list[_Parcel] = []
        coming: list[_Parcel] = []
        for (_, is_first), share in shares.items():
            share.gradients, parcels = self._on_host(share.gradients)
            coming += parcels
            share.values, parcels = self._on_host(share.values)
            self._values += parcels
            if is_first or not has_masters:
                coming += parcels
        for parcel in coming:
            parcel.come()
        there = dict.fromkeys(parcel.place for parcel in coming if parcel.place is not None)
        self._there = [_native.Moment(place) for place in there]

    def arrive(self) -> dict[tuple[int, bool], Shares]:
        """Waits until the host has all; what is updated, by group and whether it is the first step.

        Raises:
            DeviceError: A device has failed.
        """
        for moment in self._there:
            moment.wait()
        return self._shares

    def leave(self) -> None:
        """Has devices take back the values."""
        for parcel in self._values:
            parcel.go()

    def _on_host(self, tensors: list[Any]) -> tuple[list[Any], list[_Parcel]]:
        """Where each is on the host, and what of it goes there and back, by device and type."""
        found = list(tensors)
        groups: dict[tuple[Any, Any], list[int]] = {}
        for at, tensor in enumerate(tensors):
            if not tensor.is_cpu:
                groups.setdefault((tensor.device, tensor.dtype), []).append(at)
        parcels = []
        for (device, _), members in groups.items():
            parcel = _Parcel([tensors[at] for at in members], self._places.on(str(device)))
            for at, view in zip(members, parcel.views, strict=True):
                found[at] = view
            parcels.append(parcel)
        return found, parcels


class _Parcel:
    """Flat tensors of one device and type, one behind the other in memory of the host.

    Attributes:
        place: The device and its current stream; None where PyTorch waits for its own copies.
        views: What belongs to each tensor.
    """

    def __init__(self, tensors: list[Any], place: Place | None) -> None:
        self.place = place
        self._tensors = tensors
        self._counts = [tensor.numel() for tensor in tensors]
        # PyTorch's allocator gives pinned memory to the next one when its copies are done.
        self._host = _host_memory(sum(self._counts), tensors[0].dtype, is_pinned=place is not None)
        self.views = self._host.split(self._counts)

    def come(self) -> None:
        """Has them copied to the host."""
        # One copy of many small ones: each would take as long as one of 200 KB.
        source = self._tensors[0] if len(self._tensors) == 1 else torch.cat(self._tensors)
        self._host.copy_(source, non_blocking=self.place is not None)

    def go(self) -> None:
        """Has them copied from there."""
        is_queued = self.place is not None
        if len(self._tensors) == 1:
            self._tensors[0].copy_(self._host, non_blocking=is_queued)
            return
        there: Any = torch.empty(
            len(self._host), dtype=self._host.dtype, device=self._tensors[0].device
        )
        there.copy_(self._host, non_blocking=is_queued)
        torch._foreach_copy_(self._tensors, there.split(self._counts))


def check_devices(tensors: Iterable[Any]) -> None:
    """That what devices have can be copied now.

    Raises:
        DeviceError: The current stream of one is captured into a graph, or this is a fork of a
            process that has used it.
    """
    places = DirectPlaces()
    for device in dict.fromkeys(one.device for one in tensors if not one.is_cpu):
        if (place := places.on(str(device))) is not None:
            _native.check_stream(place)


def _host_memory(count: int, dtype: Any, *, is_pinned: bool) -> Any:
    if is_pinned:
        try:
            return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError:
            # The system lets no more be pinned: the driver copies it by way of memory of its own.
            pass
    return torch.empty(count, dtype=dtype, device="cpu")
