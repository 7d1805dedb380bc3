"""States whose every byte is known: tensors by path, shape and type, filled from a pattern.

Values come from a block of random bytes, so that any process can make a state, or check a loaded
one, in about the time of a copy.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock_bench.workloads.models import tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock_bench.workloads.models import Model

_PATTERN_BYTES = 64 << 20
# Coprime to the pattern's length in 64-byte steps: neighbouring tensors get different bytes.
_PATTERN_STRIDE_BYTES = 64 * 15_485_863

_INDICES_OF_RANK = 1_000_003
"""Between the first tensors of two ranks; prime, so that no two begin alike."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: where it is in the state and what it is like."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The dotted name, as libraries that take flat dictionaries only see it."""
        return ".".join(map(str, self.path))

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateSpec:
    """A state: tensors, the second names of tied ones, and plain values.

    Tied tensors are paths with the path of the tensor that each is. The first index decides the
    bytes of the tensors.
    """

    name: str
    description: str
    tensors: list[TensorSpec]
    ties: dict[Path, Path] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    first_index: int = 0
    kept: list[torch.Tensor] | None = field(default=None, repr=False)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, tied ones counted once: what every rate here is relative to."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def nested(self) -> dict[str, Any]:
        """The state as a training script holds it, every page of it resident."""
        return self.assemble(self._filled())

    def nested_targets(self) -> dict[str, Any]:
        """The same with tensors of memory that was never touched, for libraries that fill."""
        return self.assemble(self._empty())

    def flat(self) -> dict[str, torch.Tensor]:
        """The tensors alone under dotted names, tied ones once."""
        return self.named(self._filled())

    def flat_targets(self) -> dict[str, torch.Tensor]:
        """The same, never touched."""
        return self.named(self._empty())

    def held(self) -> StateSpec:
        """The same with its tensors made once, for whoever saves it again and again."""
        return replace(self, kept=self._filled())

    def difference(
        self, loaded: dict[str, torch.Tensor], names: tuple[str, ...] = ()
    ) -> str | None:
        """The first error in loaded tensors by name, all or these alone; None if there is none."""
        if names and set(loaded) != set(names):
            return "other tensors were loaded than were asked for"
        for index, tensor in enumerate(self.tensors, self.first_index):
            if names and tensor.name not in names:
                continue
            if tensor.name not in loaded:
                return f"{tensor.name} was not loaded"
            problem = difference(tensor, index, loaded[tensor.name])
            if problem:
                return problem
        return None

    def _filled(self) -> list[torch.Tensor]:
        if self.kept is not None:
            return self.kept
        return [filled(spec, index) for index, spec in enumerate(self.tensors, self.first_index)]

    def _empty(self) -> list[torch.Tensor]:
        return [torch.empty(spec.shape, dtype=spec.dtype) for spec in self.tensors]

    def named(self, made: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors in the order of the state, under their dotted names."""
        return {spec.name: tensor for spec, tensor in zip(self.tensors, made, strict=True)}

    def assemble(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Tensors in the order of the state, in their places."""
        made = {spec.path: tensor for spec, tensor in zip(self.tensors, tensors, strict=True)}
        ties = {path: made[original] for path, original in self.ties.items()}
        state: dict[str, Any] = {}
        for path, value in {**made, **ties, **self.values}.items():
            place: dict[Any, Any] = state
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = value
        return state


def rank_state(model: Model, rank: int) -> StateSpec:
    """The state of a rank of a training job: its part of the model and of the optimizer."""
    found = [
        TensorSpec(
            # The state of a training script: a dictionary of each, flat below it.
            tuple(tensor.name.split(".", 1)),
            tensor.shape,
            getattr(torch, tensor.dtype),
        )
        for tensor in tensors(model, rank)
    ]
    return StateSpec(f"rank {rank}", "", found, first_index=rank * _INDICES_OF_RANK)


def filled(spec: TensorSpec, index: int) -> torch.Tensor:
    """A tensor in memory of its own with the bytes that belong to its place in the state."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    target = bytes_of(tensor)
    for start, piece in _pattern_pieces(index, spec.nbytes):
        target[start : start + len(piece)] = piece
    return tensor


def difference(spec: TensorSpec, index: int, tensor: torch.Tensor) -> str | None:
    """The error in a loaded tensor; None if it equals the saved one, bit for bit."""
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        return f"{spec.name} is {tensor.dtype}{tuple(tensor.shape)}"
    found = bytes_of(tensor.detach().contiguous())
    for start, piece in _pattern_pieces(index, spec.nbytes):
        if not torch.equal(found[start : start + len(piece)], piece):
            return f"{spec.name} has other bytes than were saved"
    return None


def flatten(state: Any, prefix: Path = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nested state under its dotted name."""
    if isinstance(state, torch.Tensor):
        yield ".".join(map(str, prefix)), state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from flatten(value, (*prefix, key))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


_pattern: torch.Tensor | None = None


def _pattern_pieces(index: int, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    global _pattern
    if _pattern is None:
        block = np.random.Generator(np.random.PCG64(7)).bytes(_PATTERN_BYTES)
        _pattern = torch.frombuffer(bytearray(block), dtype=torch.uint8)
    done = 0
    # Each piece begins elsewhere: a tensor does not repeat itself.
    for begin in itertools.count(index):
        if done == nbytes:
            return
        position = begin * _PATTERN_STRIDE_BYTES % _PATTERN_BYTES
        piece = _pattern[position : position + nbytes - done]
        yield done, piece
        done += len(piece)
