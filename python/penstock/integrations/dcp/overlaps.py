"""`FilledTargets`: finds targets of a load that share memory, in whole or in part.

A state may have one memory under several names. Each is filled with the checkpoint's tensor of its
own name, so that the last one would silently overwrite others that differ.
"""

from __future__ import annotations

import bisect
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.checkpoint.state import ties
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.plugin import of_tensor
from penstock.tensors.copying import byte_view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.plugin import Memory


class _Target(NamedTuple):
    """A target that was filled.

    Attributes:
        low: Address of its first byte.
        number: Its number in the order of filling.
        name: Name of its tensor in the state.
        tensor: The target.
        memory: Its memory.
    """

    low: int
    number: int
    name: str
    tensor: torch.Tensor
    memory: Memory


class FilledTargets:
    """The targets that a load has filled so far."""

    def __init__(self) -> None:
        # By device, sorted by address.
        self._targets: dict[str, list[_Target]] = {}
        self._longest: dict[str, int] = {}
        self._count = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Records a filled target."""
        memory = _memory(tensor, name)
        if memory is None:
            return
        self._count += 1
        target = _Target(memory.low, self._count, name, tensor, memory)
        bisect.insort(self._targets.setdefault(memory.device, []), target)
        length = memory.high - memory.low
        self._longest[memory.device] = max(length, self._longest.get(memory.device, 0))

    def sharing(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The targets of other names that share memory with a tensor."""
        memory = _memory(tensor, name)
        if memory is None or memory.device not in self._targets:
            return []
        targets = self._targets[memory.device]
        first = memory.low - self._longest[memory.device]
        begin = bisect.bisect_left(targets, (first,))
        end = bisect.bisect_left(targets, (memory.high,))
        return [
            (one.name, one.tensor)
            for one in targets[begin:end]
            if one.name != name and ties.share_memory(one.memory, memory)
        ]

    @contextmanager
    def kept(self, name: str, tensor: torch.Tensor) -> Iterator[None]:
        """Checks that filling a target leaves targets of other names unchanged."""
        before = [(other, one, one.clone()) for other, one in self.sharing(name, tensor)]
        yield
        for other, one, was in before:
            if not torch.equal(_bytes_of(one), _bytes_of(was)):
                raise StateMismatchError(
                    f"{name}: shares memory with {other} in the state, and the checkpoint has "
                    "other elements for each: build the state without the tie",
                    key=name,
                )


def _memory(tensor: torch.Tensor, name: str) -> Memory | None:
    """A target's memory; None if it has no bytes, or is no view of a known storage."""
    try:
        memory = of_tensor(tensor, name)
    except UnsupportedStateError:
        return None
    return memory if memory.high > memory.low else None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return byte_view(tensor.contiguous())
