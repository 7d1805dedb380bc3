"""Fingerprints of tensors, by which ranks find out whether they hold the same ones.

A fingerprint covers name, type, shape and every element. For host memory it costs a read of it; for
another device, a read on that device.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from penstock import _native
from penstock.tensors.memory import CPU, to_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.tensors.memory import Memory

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types of the same size, as which elements are read."""

_CHUNK_ITEMS = 1 << 22
"""Number of elements that are widened at once on a device."""

_MULTIPLIER = 0x1E3779B97F4A7C15
"""2⁶⁴ divided by the golden ratio, as for multiplicative hashing, without its highest bit."""


def fingerprints(tensors: Sequence[tuple[str, Memory]]) -> list[int]:
    """Returns a 64-bit number for each torch tensor, given its name and memory."""
    digests: dict[int, int] = {}
    on_host = [index for index, (_, memory) in enumerate(tensors) if memory.device == CPU]
    sources = [to_source(tensors[index][1], tensors[index][0]) for index in on_host]
    digests.update(zip(on_host, _native.digests(sources), strict=True))
    beyond: dict[str, list[int]] = {}
    for index, (_, memory) in enumerate(tensors):
        if memory.device != CPU:
            beyond.setdefault(memory.device, []).append(index)
    for indices in beyond.values():
        sums = [device_digest(tensors[index][1].owner.detach()) for index in indices]
        # One synchronization for all tensors of a device.
        digests.update(zip(indices, torch.stack(sums).tolist(), strict=True))
    return [_mark(*tensor, digests[index]) for index, tensor in enumerate(tensors)]


def _mark(name: str, memory: Memory, digest: int) -> int:
    text = f"{name}\0{memory.dtype}\0{tuple(memory.shape)}\0{digest}"
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Hashes a tensor on its device.

    Returns:
        The sum, modulo 2⁶⁴, of a hash of each element's bits and position: a zero-dimensional int64
        tensor on that device. The host does not wait for it.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # Some types have no arithmetic; integers do.
    items = tensor.view(_BITS[tensor.element_size()]).reshape(-1)
    # 64-bit items are split, as a product keeps little of its high bits.
    items = items.view(torch.int32) if items.dtype is torch.int64 else items
    places = torch.arange(1, min(len(items), _CHUNK_ITEMS) + 1, device=tensor.device)
    places = _mixed(places)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in torch.split(items, _CHUNK_ITEMS):
        total = total * _MULTIPLIER + _mixed(chunk.to(torch.int64) + places[: len(chunk)]).sum()
    return total


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Mixes numbers so that every bit of a result depends on all bits of its input."""
    for _ in range(2):
        numbers = numbers * _MULTIPLIER
        numbers ^= numbers >> 32
    return numbers * _MULTIPLIER
