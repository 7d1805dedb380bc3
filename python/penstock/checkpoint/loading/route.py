"""`Route`: the way of a tensor's bytes to a target of ``load(into=…)``.

`choose_routes` chooses the route of each target once, before anything is read or written.
`LoadPlan` carries the routes out. Two kinds of values have no choice: a tensor in a file goes
through the reads of its file's owner (`Filling`), and a value that is built anew gets new memory.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.checkpoint.loading.device_tensors import DEVICE_STAGING_BYTES
from penstock.tensors.devices import is_scattered
from penstock.tensors.memory import CPU

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.checkpoint.loading.target import Target
    from penstock.checkpoint.view.view import View


class Route(Enum):
    """The way of a tensor's bytes from storage to its target.

    The native module fills memory that it can address: memory of the host, and memory of a device
    with a driver unless it is scattered. PyTorch or NumPy copies to all other memory.
    """

    IN_PLACE = auto()
    """Into the target's memory, as one entry of the read.

    The target is a whole stored tensor, contiguous on the host, or addressable on a device. One
    target of each stored tensor takes this route, on the host if there is one: the other targets
    of the tensor are copied from it.
    """

    BOXES = auto()
    """Into the target's memory, box by box.

    The target is addressable, and it is a `DTensor`, or its stored tensor consists of boxes that
    several ranks stored.
    """

    HOST_PART = auto()
    """Into host memory of the size of the rank's part of a `DTensor`, and copied from there.

    The local tensor is not addressable, and the whole tensor may not fit into any memory.
    """

    DEVICE_COPY = auto()
    """Into a new contiguous tensor of the target's device, and copied from there.

    The target is scattered on a device, or a window of a stored tensor. The new tensors are bounded
    in size (`DeviceStaging`), and no other value needs the stored tensor in host memory.
    """

    HOST_COPY = auto()
    """As a whole into new host memory, and copied from there.

    Every other route is closed: the target is strided on the host, on a device without a driver, a
    window of a stored tensor, or a conjugate, or it has no bytes.
    """

    TARGET_COPY = auto()
    """Copied from the target of the same stored tensor that is filled in place."""

    ALIAS = auto()
    """Filled through another target, with which it shares its memory and the stored elements."""

    NOTHING = auto()
    """Not read: the target is a `DTensor` of which this rank holds no elements."""


class Routes(NamedTuple):
    """The routes of all targets of a load.

    Attributes:
        targets: The targets by route, in the order of the state; each route is present.
        devices: The device of each stored tensor that takes `Route.DEVICE_COPY`, by index.
    """

    targets: dict[Route, list[Target]]
    devices: dict[int, Any]


def choose_routes(targets: Sequence[Target], seen: View, on_host: set[int]) -> Routes:
    """Chooses the route of each target.

    Args:
        targets: The targets; two that share memory have equal claims.
        seen: The view of the checkpoint to which indices refer.
        on_host: Indices of the tensors that values of other kinds need in host memory.
    """
    is_movable = _movable(targets, on_host)
    in_place, boxed = _addressed(targets, seen, is_movable)
    found: dict[Route, list[Target]] = {route: [] for route in Route}
    copied: list[Target] = []
    for target in targets:
        if in_place.get(target.index) is target:
            route = Route.IN_PLACE
        elif target.boxes is not None and (not target.boxes or 0 in target.memory.shape):
            route = Route.NOTHING
        elif _is_in_boxes(target, seen) and _is_addressable(target):
            route = Route.BOXES if boxed[target.claim] is target else Route.ALIAS
        elif target.boxes is not None and target.window is None:
            route = Route.HOST_PART
        elif target.index in in_place:
            is_tied = target.claim == in_place[target.index].claim
            route = Route.ALIAS if is_tied else Route.TARGET_COPY
        elif target.claim in boxed:
            route = Route.ALIAS
        else:
            copied.append(target)
            continue
        found[route].append(target)
    # Targets of one stored tensor are copied from one place.
    devices = {
        target.index: target.memory.owner.device
        for target in copied
        if is_movable(target) and target.boxes is None and _is_bounded(target, seen)
    }
    for target in copied:
        route = Route.DEVICE_COPY if target.index in devices else Route.HOST_COPY
        found[route].append(target)
    return Routes(found, devices)


def _movable(targets: Sequence[Target], on_host: set[int]) -> Callable[[Target], bool]:
    """Returns whether a target may be filled without its tensor's bytes in host memory."""
    if all(target.place is None for target in targets):
        return lambda _: False
    on_host = on_host | {one.index for one in targets if isinstance(one.value, np.ndarray)}

    def is_movable(target: Target) -> bool:
        return target.place is not None and not _is_empty(target) and target.index not in on_host

    return is_movable


def _addressed(
    targets: Sequence[Target], seen: View, is_movable: Callable[[Target], bool]
) -> tuple[dict[int, Target], dict[tuple[Any, ...], Target]]:
    """Returns the targets filled in place, by index, and those filled box by box, by claim."""
    in_place: dict[int, Target] = {}
    boxed: dict[tuple[Any, ...], Target] = {}
    on_device: list[Target] = []
    for target in targets:
        if not _is_addressable(target):
            continue
        if _is_in_boxes(target, seen):
            boxed.setdefault(target.claim, target)
        elif target.place is not None:
            on_device.append(target)
        elif target.memory.strides is None:
            in_place.setdefault(target.index, target)
    # Windows are copied from a contiguous tensor.
    windows = {one.index for one in targets if one.window is not None} if on_device else set()
    for target in filter(is_movable, on_device):
        if target.memory.strides is None or target.index not in windows:
            in_place.setdefault(target.index, target)
    return in_place, boxed


def _is_empty(target: Target) -> bool:
    """Whether a target has no bytes of its own at a known address."""
    return target.memory.high <= target.memory.low


def _is_addressable(target: Target) -> bool:
    """Whether the native module can fill the target's memory with stored elements."""
    memory = target.memory
    if target.window is not None or _is_empty(target):
        return False
    # Scattered device memory is filled by PyTorch, with one kernel.
    return memory.device == CPU or (target.place is not None and not is_scattered(memory))


def _is_in_boxes(target: Target, seen: View) -> bool:
    """Whether the stored elements of a target are boxes, not one entry."""
    return target.boxes is not None or target.index in seen.wholes


def _is_bounded(target: Target, seen: View) -> bool:
    """Whether a new device tensor of the stored tensor's size is acceptable.

    The stored tensor of a window may be much larger than the target: then it stays on the host.
    """
    entry = seen.tensors[target.index]
    return target.window is None or entry.end - entry.begin <= DEVICE_STAGING_BYTES
