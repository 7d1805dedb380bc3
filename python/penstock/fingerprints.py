"""Fingerprints of plain tensors: by these ranks find out whether they hold the same ones.

A fingerprint covers name, type and shape, all elements of a small tensor, and of a larger one a
sample that is spread over it: what different ranks have computed differs nearly everywhere.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from penstock.memory import CPU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.memory import Memory

_WHOLE_BYTES_MAX = 4 << 10
_SAMPLES = 256

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types whose elements are copied as they are, by their size."""


def fingerprints(tensors: Sequence[tuple[str, Memory]]) -> list[int]:
    """A 64-bit number for each tensor.

    Of each device, all samples come to the host in one copy.

    Args:
        tensors: Names and memories of torch tensors.
    """
    found = [0] * len(tensors)
    on_device: defaultdict[str, list[int]] = defaultdict(list)
    for index, (name, memory) in enumerate(tensors):
        is_small = memory.nbytes <= _WHOLE_BYTES_MAX
        if is_small and memory.device == CPU and memory.strides is None:
            # Most of them by number: what there is without a look by PyTorch.
            data = ctypes.string_at(memory.address, memory.nbytes) if memory.nbytes else b""
            found[index] = _digest(name, memory, data)
        else:
            on_device[memory.device].append(index)
    for indices in on_device.values():
        samples = [_sample(tensors[index][1].owner.detach()) for index in indices]
        data = torch.cat(samples).cpu().numpy().tobytes()
        at = 0
        for index, sample in zip(indices, samples, strict=True):
            found[index] = _digest(*tensors[index], data[at : at + len(sample)])
            at += len(sample)
    return found


def _digest(name: str, memory: Memory, data: bytes) -> int:
    text = f"{name}\0{memory.dtype}\0{tuple(memory.shape)}\0".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text + data, digest_size=8).digest(), "little")


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of all elements, or of some: the first and about the last among them."""
    bits = _BITS.get(tensor.element_size())
    # Not all types can be indexed; whole numbers can.
    tensor = torch.view_as_real(tensor) if bits is None else tensor.view(bits)
    items = tensor.numel()
    step = (items - 1) // (_SAMPLES - 1)
    if tensor.nbytes <= _WHOLE_BYTES_MAX:
        chosen = tensor.reshape(-1)
    elif tensor.is_contiguous():
        chosen = tensor.view(-1)[::step][:_SAMPLES]
    else:
        positions = torch.arange(0, items, step, device=tensor.device)[:_SAMPLES]
        chosen = tensor[torch.unravel_index(positions, tensor.shape)]
    return chosen.contiguous().view(torch.uint8)
