"""Determines which device memory the native module accesses in place.

This is CUDA memory, by PyTorch's addresses and streams. Tensors of other devices are copied to the
host by PyTorch, because Penstock has no driver for them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from penstock import _native
from penstock.errors import DeviceError
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


class DeviceStream(NamedTuple):
    """Memory of a device, as work queued on one of its streams sees it.

    Attributes:
        ordinal: Number of the device.
        stream: Handle of the stream.
    """

    ordinal: int
    stream: int


class _Addressed(Protocol):
    """The address and device of a `penstock.tensors.memory.Memory`."""

    @property
    def address(self) -> int: ...
    @property
    def device(self) -> str: ...


class _Strided(Protocol):
    """The layout of a `penstock.tensors.memory.Memory`."""

    @property
    def item_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...] | None: ...


class CurrentStreams:
    """Looks up the current stream of each device once per call.

    A call runs in one thread, which has one current stream per device, so PyTorch need not be asked
    for every tensor.
    """

    def __init__(self) -> None:
        self._known: dict[str, DeviceStream | None] = {}

    def of(self, memory: _Addressed) -> DeviceStream | None:
        """Returns the place of a memory, on the stream that is current for its device.

        Args:
            memory: The memory of a tensor or array.

        Returns:
            None for host memory, and if PyTorch has to copy it.
        """
        return self.on(memory.device) if memory.address else None

    def on(self, device: str) -> DeviceStream | None:
        """Returns the place of memory with known addresses on a device; None as for `of`."""
        if device not in self._known:
            self._known[device] = _current_stream(device)
        return self._known[device]


def _current_stream(device: str) -> DeviceStream | None:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not is_direct():
        return None
    check_fork()
    torch = sys.modules["torch"]
    ordinal = int(number or torch.cuda.current_device())
    stream = torch.cuda.current_stream(ordinal).cuda_stream
    # Each thread has another stream behind that handle, and other threads queue work here.
    return None if stream == _PER_THREAD else DeviceStream(ordinal, stream)


def check_fork() -> None:
    """Refuses the use of CUDA in a fork of a process that has used it."""
    if sys.modules["torch"].cuda._is_in_bad_fork():
        raise DeviceError(
            "CUDA was used before this process was forked: no fork of it can use it; start "
            "processes with spawn or forkserver where they save or load what a device has",
            code=None,
        )


_PER_THREAD = 2
"""``CU_STREAM_PER_THREAD``."""

_RUN_BYTES_MIN = 512
"""Smallest contiguous run in a tensor's rows for which a device copies row by row.

Each copy of a row takes some microseconds, and a transposed matrix has one row per element.
"""


def is_scattered(memory: _Strided) -> bool:
    """Whether the contiguous runs are too short and too many to be copied one by one."""
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


def open_stream(device: torch.device) -> DeviceStream | None:
    """Returns the place of a device's memory; work may be queued on its current stream.

    Returns:
        None if PyTorch has to copy, as for `CurrentStreams`.
    """
    place = CurrentStreams().on(str(device))
    if place is not None:
        _native.check_stream(place)
    return place


def check_known(device: torch.device, place: DeviceStream | None) -> None:
    """Checks that the native module can use the current stream of a device it drives."""
    if place is None and device.type == "cuda" and is_direct():
        raise DeviceError(
            "the current stream is the default one of each thread: use another, as by"
            " torch.cuda.stream()",
            code=None,
        )


@functools.cache
def is_direct() -> bool:
    """Whether CUDA memory is accessed in place: an NVIDIA driver is usable."""
    torch = sys.modules["torch"]
    # AMD devices are also called "cuda" by PyTorch.
    return torch.version.hip is None and _native.cuda_problem() is None


def pinned(shape: Sequence[int], dtype: Any) -> torch.Tensor | None:
    """Allocates pinned host memory of PyTorch; None if this is not possible.

    PyTorch reuses the memory only after its own copies are done.
    """
    with contextlib.suppress(RuntimeError):
        empty = dtypes.import_torch().empty
        # The device is named because the default device may not be the host.
        found = empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        return cast("torch.Tensor", found)
    return None


def current_streams(ordinals: Iterable[int]) -> list[DeviceStream]:
    """Returns the current streams of this thread on the given devices."""
    torch = sys.modules["torch"]
    return [
        DeviceStream(number, torch.cuda.current_stream(number).cuda_stream)
        for number in sorted(ordinals)
    ]


def device_of(device: Any) -> torch.device | None:
    """Converts a caller's device to a `torch.device`; None stays None."""
    if device is None:
        return None
    try:
        found = dtypes.import_torch().device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device={device!r}: {error}") from None
    if found.type == "meta":
        raise ValueError(f"device={device!r}: it has no memory")
    return cast("torch.device", found)
