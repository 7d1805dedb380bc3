"""`Budget`: memory shared by several streamed models."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from penstock.common.option_kinds import Number

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.offload.streaming.streamer import Streamer
    from penstock.offload.streaming.weights.shares import Needs

MEMORY_BYTES = Number(1, (1 << 63) - 1, "bytes", is_open=False)


class Budget:
    """Memory for the weights of several models of a process: ``stream(…, memory_bytes=budget)``.

    Each model gets the least that it needs. The rest is divided in proportion to the bytes of their
    weights, but no model gets more than it can use. When another model is added, the shares of the
    others shrink, once none of their blocks is being called, and weights they held in memory are
    read again. The share of a model that is gone is divided when the next one is added.

    Args:
        memory_bytes: Bytes for the weights of all models.

    Attributes:
        memory_bytes: Bytes for the weights of all models.

    Raises:
        ValueError: ``memory_bytes`` is out of range.

    Example:
        >>> import penstock.offload, safetensors.torch, tempfile, torch
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(2)]
        >>> directory = tempfile.mkdtemp()
        >>> safetensors.torch.save_file(layers[0].state_dict(), directory + "/model.safetensors")
        >>> budget = penstock.offload.Budget(1 << 20)
        >>> models = [
        ...     penstock.offload.stream(one, weights=directory, memory_bytes=budget)
        ...     for one in layers
        ... ]
        >>> with torch.inference_mode():
        ...     torch.equal(models[0](torch.ones(64)), models[1](torch.ones(64)))
        True
    """

    def __init__(self, memory_bytes: int) -> None:
        MEMORY_BYTES.check("memory_bytes", memory_bytes)
        self.memory_bytes = memory_bytes
        self._members: list[weakref.ref[Streamer]] = []
        self._lock = threading.Lock()

    def _admit(self, needs: Needs, made: Callable[[int], Streamer]) -> Streamer:
        """Adds a model, and divides the memory anew; ``made`` makes its streamer of a size."""
        with self._lock:
            members = [one for ref in self._members if (one := ref()) is not None]
            every = [*(one.needs for one in members), needs]
            least_bytes = sum(one.least_bytes for one in every)
            if least_bytes > self.memory_bytes:
                others = "" if not members else f", with the {len(members)} that share it,"
                raise ValueError(
                    f"memory_bytes={self.memory_bytes}: {needs.why}, and{others} {least_bytes} is"
                    " the least that works"
                )
            *others_bytes, own_bytes = divided(self.memory_bytes, every)
            for member, share_bytes in zip(members, others_bytes, strict=True):
                if share_bytes != member.memory_bytes:
                    member.resize(share_bytes)
            streamer = made(own_bytes)
            self._members = [weakref.ref(one) for one in [*members, streamer]]
            return streamer


def divided(memory_bytes: int, needs: list[Needs]) -> list[int]:
    """Shares of memory: the least for each, the rest by weight, none beyond what it can use."""
    shares = [one.least_bytes for one in needs]
    open_ones = {index for index, one in enumerate(needs) if one.most_bytes > shares[index]}
    left = memory_bytes - sum(shares)
    while open_ones and left:
        weight = sum(needs[index].most_bytes for index in open_ones)
        # A model that can use less than its part leaves the rest to the others.
        parts = {index: left * needs[index].most_bytes // weight for index in open_ones}
        full = {
            index
            for index, part in parts.items()
            if shares[index] + part >= needs[index].most_bytes
        }
        for index in full or open_ones:
            part = min(parts[index], needs[index].most_bytes - shares[index])
            shares[index] += part
            left -= part
        if not full:
            break
        open_ones -= full
    return shares
