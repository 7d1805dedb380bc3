"""Which memory of devices the native module reads where it is.

That of CUDA devices, with the addresses and streams that PyTorch has. Other devices have no
driver here: their tensors are copied to the host by PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from penstock import _native
from penstock.errors import DeviceError
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


Place: TypeAlias = "_native._Device"
"""Number of a device, and the handle of a stream on which its memory is what it should be."""


class _Addressed(Protocol):
    """A `penstock.tensors.memory.Memory`, as far as its place matters."""

    @property
    def address(self) -> int: ...
    @property
    def device(self) -> str: ...


class _Strided(Protocol):
    """A `penstock.tensors.memory.Memory`, as far as its layout matters."""

    @property
    def item_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...] | None: ...


class DirectPlaces:
    """Where the native module reads and fills memory of devices, in one call.

    A call has one thread, and that has one current stream of each device: PyTorch is asked once
    for each, and not for every tensor.
    """

    def __init__(self) -> None:
        self._known: dict[str, Place | None] = {}

    def of(self, memory: _Addressed) -> Place | None:
        """The place of a memory, on the stream that its user works on at the moment.

        Args:
            memory: One of a tensor or array.

        Returns:
            None for the host's, and where PyTorch has to copy it to or from there.

        Raises:
            DeviceError: This is a fork of a process that has used CUDA.
        """
        return self.on(memory.device) if memory.address else None

    def on(self, device: str) -> Place | None:
        """The place of whatever memory a device has that shows its addresses; else as `of`."""
        if device not in self._known:
            self._known[device] = _place(device)
        return self._known[device]


def _place(device: str) -> Place | None:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not is_direct():
        return None
    check_fork()
    torch = sys.modules["torch"]
    ordinal = int(number or torch.cuda.current_device())
    stream = torch.cuda.current_stream(ordinal).cuda_stream
    # Each thread has another one by that handle, and others queue here.
    return None if stream == _PER_THREAD else (ordinal, stream)


def check_fork() -> None:
    """Refuses to go on with devices where these cannot be used.

    Raises:
        DeviceError: This is a fork of a process that has used CUDA.
    """
    if sys.modules["torch"].cuda._is_in_bad_fork():
        raise DeviceError(
            "CUDA was used before this process was forked: no fork of it can use it; start "
            "processes with spawn or forkserver where they save or load what a device has",
            code=None,
        )


_PER_THREAD = 2
"""``CU_STREAM_PER_THREAD``."""

_RUN_BYTES_MIN = 512
"""What lies together in a tensor's rows, at the least, for a device to copy it row by row.

A copy of rows takes some microseconds, and a transposed matrix has a row for each element.
"""


def is_scattered(memory: _Strided) -> bool:
    """Whether so little of it lies together that rows are too many to be copied one by one."""
    if memory.strides is None:
        return False
    run_bytes = memory.item_bytes
    for dim, stride in zip(reversed(memory.shape), reversed(memory.strides), strict=True):
        if dim == 1:
            continue
        if stride != run_bytes:
            return memory.nbytes // run_bytes > 1 and run_bytes < _RUN_BYTES_MIN
        run_bytes *= dim
    return False


def open_place(device: torch.device) -> Place | None:
    """The place of a device's memory, of which work may be queued on the current stream.

    Returns:
        None where PyTorch has to copy, as `DirectPlaces`.

    Raises:
        DeviceError: The stream is being captured, the driver fails, or this is a fork of a process
            that has used CUDA.
    """
    place = DirectPlaces().on(str(device))
    if place is not None:
        _native.check_stream(place)
    return place


def check_known(device: torch.device, place: Place | None) -> None:
    """That the current stream of a device is one that the native module reaches, if it has one.

    Raises:
        DeviceError: It is the one that each thread has by the same handle.
    """
    if place is None and device.type == "cuda" and is_direct():
        raise DeviceError(
            "the current stream is the default one of each thread: use another, as by"
            " torch.cuda.stream()",
            code=None,
        )


@functools.cache
def is_direct() -> bool:
    """Whether memory of CUDA devices is read where it is: there is a driver of that kind."""
    torch = sys.modules["torch"]
    # Devices of AMD have the same name.
    return torch.version.hip is None and _native.cuda_problem() is None


def pinned(shape: Sequence[int], dtype: Any) -> torch.Tensor | None:
    """Memory of the host that a device copies by itself, of PyTorch's; None if it has none.

    PyTorch gives it to nobody else before its own copies are done.
    """
    with contextlib.suppress(RuntimeError):
        empty = dtypes.import_torch().empty
        # Said, as tensors may be on a device by default.
        found = empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        return cast("torch.Tensor", found)
    return None


def current_streams(ordinals: Iterable[int]) -> list[Place]:
    """The streams of devices that this thread works on at the moment."""
    torch = sys.modules["torch"]
    return [(number, torch.cuda.current_stream(number).cuda_stream) for number in sorted(ordinals)]


def device_of(device: Any) -> torch.device | None:
    """A device as callers name it.

    Raises:
        ValueError: PyTorch knows no such device.
    """
    if device is None:
        return None
    try:
        found = dtypes.import_torch().device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device={device!r}: {error}") from None
    if found.type == "meta":
        raise ValueError(f"device={device!r}: it has no memory")
    return cast("torch.device", found)
