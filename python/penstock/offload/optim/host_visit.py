"""`HostVisit`: copies parameters from devices to the host for an update, and back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from penstock import _native
from penstock.tensors.devices import CurrentStreams, open_stream, pinned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.offload.optim.shares import ParameterShares
    from penstock.tensors.devices import DeviceStream


class HostVisit:
    """Elements of parameters, in host memory for an update.

    Host tensors are updated in place. Device tensors are copied by the device, after the work
    queued on its current stream, while others are updated: to pinned memory when this is made, and
    back in `leave`. The host waits in `wait`. Work queued after `leave` sees the updated values.
    Values and gradients of the shares become host tensors. With ``has_masters`` values are computed
    from masters alone, except in the first step.
    """

    def __init__(
        self, shares: dict[tuple[int, bool], ParameterShares], *, has_masters: bool
    ) -> None:
        self._shares = shares
        self._places = CurrentStreams()
        self._values: list[_PackedTensors] = []
        coming: list[_PackedTensors] = []
        for (_, is_first), share in shares.items():
            share.gradients, parcels = self._on_host(share.gradients)
            coming += parcels
            share.values, parcels = self._on_host(share.values)
            self._values += parcels
            if is_first or not has_masters:
                coming += parcels
        for parcel in coming:
            parcel.copy_to_host()
        there = dict.fromkeys(parcel.place for parcel in coming if parcel.place is not None)
        self._there = [_native.Moment(place) for place in there]

    def wait(self) -> dict[tuple[int, bool], ParameterShares]:
        """Waits until the host has all elements; returns the shares by group and first step."""
        for moment in self._there:
            moment.wait()
        return self._shares

    def leave(self) -> None:
        """Queues the copies of updated values back to the devices."""
        for parcel in self._values:
            parcel.copy_back()

    def _on_host(self, tensors: list[Any]) -> tuple[list[Any], list[_PackedTensors]]:
        """The host tensor of each tensor, and the parcels of device tensors, by device and type."""
        found = list(tensors)
        groups: dict[tuple[Any, Any], list[int]] = {}
        for at, tensor in enumerate(tensors):
            if not tensor.is_cpu:
                groups.setdefault((tensor.device, tensor.dtype), []).append(at)
        parcels = []
        for (device, _), members in groups.items():
            parcel = _PackedTensors([tensors[at] for at in members], self._places.on(str(device)))
            for at, view in zip(members, parcel.views, strict=True):
                found[at] = view
            parcels.append(parcel)
        return found, parcels


class _PackedTensors:
    """Flat tensors of one device and type, packed in host memory.

    Attributes:
        place: The device and its current stream; None where PyTorch waits for its own copies.
        views: The part of each tensor.
    """

    def __init__(self, tensors: list[Any], place: DeviceStream | None) -> None:
        self.place = place
        self._tensors = tensors
        self._counts = [tensor.numel() for tensor in tensors]
        count, self._dtype = sum(self._counts), tensors[0].dtype
        self._host: Any = None if place is None else pinned([count], self._dtype)
        self._is_queued = self._host is not None
        if self._host is None:
            self._host = torch.empty(count, dtype=self._dtype, device="cpu")
        self.views = self._host.split(self._counts)

    def copy_to_host(self) -> None:
        """Queues the copy to the host."""
        if (packed := self._packed()) is None:
            for view, tensor in zip(self.views, self._tensors, strict=True):
                view.copy_(tensor, non_blocking=self._is_queued)
            return
        torch._foreach_copy_(packed.split(self._counts), self._tensors)
        self._host.copy_(packed, non_blocking=self._is_queued)

    def copy_back(self) -> None:
        """Queues the copy back to the device."""
        if (packed := self._packed()) is None:
            for view, tensor in zip(self.views, self._tensors, strict=True):
                tensor.copy_(view, non_blocking=self._is_queued)
            return
        packed.copy_(self._host, non_blocking=self._is_queued)
        torch._foreach_copy_(self._tensors, packed.split(self._counts))

    def _packed(self) -> Any:
        """Device memory for all tensors: copying one small tensor takes as long as copying 200 KB.

        Returns:
            None to copy each by itself: for one tensor, or if the device has no memory left.
        """
        if len(self._tensors) == 1:
            return None
        with contextlib.suppress(torch.OutOfMemoryError):
            count, device = len(self._host), self._tensors[0].device
            return torch.empty(count, dtype=self._dtype, device=device)
        return None


def options_on_host(group: dict[str, Any]) -> dict[str, Any]:
    """Options of a group as kernels of the host take them; waits for options on a device.

    PyTorch's own optimizers copy them without waiting where parameters are on the host.
    """
    return {name: _on_host(value) for name, value in group.items()}


def _on_host(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_on_host, value))
    return value.to("cpu") if isinstance(value, torch.Tensor) else value


def check_devices(tensors: Iterable[Any]) -> None:
    """Raises unless tensors on devices can be copied now."""
    for device in dict.fromkeys(one.device for one in tensors if not one.is_cpu):
        open_stream(device)
