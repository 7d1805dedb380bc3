"""Which memory of devices the native module reads where it is.

That of CUDA devices, with the addresses and streams that PyTorch has. Other devices have no
driver here: their tensors are copied to the host by PyTorch.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, TypeAlias

from penstock import _native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.state.memory import Memory

Place: TypeAlias = "_native._Device"
"""Number of a device, and the handle of a stream on which its memory is what it should be."""


def direct_place(memory: Memory) -> Place | None:
    """Where the native module reads a memory, on the stream that its user works on at the moment.

    Args:
        memory: One of a tensor, on any device but the host.

    Returns:
        None where PyTorch has to copy it to the host.
    """
    kind, _, number = memory.device.partition(":")
    if kind != "cuda" or not memory.address or not is_direct():
        return None
    torch = sys.modules["torch"]
    ordinal = int(number or torch.cuda.current_device())
    return ordinal, torch.cuda.current_stream(ordinal).cuda_stream


@functools.cache
def is_direct() -> bool:
    """Whether memory of CUDA devices is read where it is: there is a driver of that kind."""
    torch = sys.modules["torch"]
    # Devices of AMD have the same name.
    return torch.version.hip is None and _native.cuda_problem() is None


def current_streams(ordinals: Iterable[int]) -> list[Place]:
    """The streams of devices that this thread works on at the moment."""
    torch = sys.modules["torch"]
    return [(number, torch.cuda.current_stream(number).cuda_stream) for number in sorted(ordinals)]
