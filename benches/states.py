"""The states that are saved and loaded: shapes of real training runs, bytes from a pattern.

A state is described by its tensors' paths, shapes and dtypes; values come from a block of random
bytes, so that any process can make the state, or check a loaded one, in about the time of a copy.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GIB = 1 << 30
NAMES = ("llama", "gpt2", "small")

_PATTERN_BYTES = 64 << 20
# Coprime to the pattern's length in 64-byte steps: neighbouring tensors get different bytes.
_PATTERN_STRIDE_BYTES = 64 * 15_485_863
_SMALL_TENSORS = 200_000
_SMALL_TENSORS_TINY = 5_000

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
    """A state: tensors, the second names of tied ones, and plain values."""

    name: str
    description: str
    tensors: list[TensorSpec]
    ties: dict[Path, Path] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, tied ones counted once: what every rate here is relative to."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def nested(self) -> dict[str, Any]:
        """The state as a training script holds it, every page of it resident."""
        return self._assemble(filled)

    def nested_targets(self) -> dict[str, Any]:
        """The same with tensors of memory that was never touched, for libraries that fill."""
        return self._assemble(lambda spec, _: torch.empty(spec.shape, dtype=spec.dtype))

    def flat(self) -> dict[str, torch.Tensor]:
        """The tensors alone under dotted names, tied ones once."""
        return {spec.name: filled(spec, index) for index, spec in enumerate(self.tensors)}

    def _assemble(self, make: Callable[[TensorSpec, int], torch.Tensor]) -> dict[str, Any]:
        made = {spec.path: make(spec, index) for index, spec in enumerate(self.tensors)}
        ties = {path: made[original] for path, original in self.ties.items()}
        state: dict[str, Any] = {}
        for path, value in {**made, **ties, **self.values}.items():
            place: dict[Any, Any] = state
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = value
        return state


@cache
def describe(name: str, size_bytes: int, is_tiny: bool = False) -> StateSpec:
    """The state of a name; of ``llama``, with about that size.

    Tiny ones have fewer tensors and show that everything runs; no bar is about them.
    """
    if name == "llama":
        return _llama(size_bytes)
    if name == "gpt2":
        return _gpt2(layers=1, vocabulary=1024) if is_tiny else _gpt2()
    if name == "small":
        return _small(_SMALL_TENSORS_TINY if is_tiny else _SMALL_TENSORS)
    if name == "toy":
        return _llama(1 << 20)
    raise ValueError(f"no state is called {name!r}: {', '.join(NAMES)}")


def filled(spec: TensorSpec, index: int) -> torch.Tensor:
    """A tensor in memory of its own with the bytes that belong to its place in the state."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    target = _bytes_of(tensor)
    for start, piece in _pattern_pieces(index, spec.nbytes):
        target[start : start + len(piece)] = piece
    return tensor


def difference(spec: TensorSpec, index: int, tensor: torch.Tensor) -> str | None:
    """What is wrong with a loaded tensor; None if it is what was saved, bit for bit."""
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        return f"{spec.name} is {tensor.dtype}{tuple(tensor.shape)}"
    found = _bytes_of(tensor.detach().contiguous())
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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_pattern: torch.Tensor | None = None


def _pattern_pieces(index: int, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    global _pattern
    if _pattern is None:
        block = np.random.Generator(np.random.PCG64(7)).bytes(_PATTERN_BYTES)
        _pattern = torch.frombuffer(bytearray(block), dtype=torch.uint8)
    position = index * _PATTERN_STRIDE_BYTES % _PATTERN_BYTES
    done = 0
    while done < nbytes:
        piece = _pattern[position : position + nbytes - done]
        yield done, piece
        done += len(piece)
        position = 0


def _llama(size_bytes: int) -> StateSpec:
    """bf16 weights and fp32 Adam moments of a Llama whose state has about the given size.

    Proportions of Llama 3: ffn 3.5 times the hidden size, a quarter of the heads for keys and
    values, a layer per 128 of hidden size. Of the hidden sizes that fit, the one whose
    vocabulary comes out nearest to 32,000.
    """
    parameters = size_bytes // 10  # 2 bytes of weight and twice 4 of moments each.

    def vocabulary(hidden: int) -> int:
        layers = max(1, hidden // 128)
        ffn, dkv = hidden * 7 // 2, hidden // 4
        layer = 2 * hidden + hidden * (hidden + 2 * dkv) + hidden**2 + 3 * ffn * hidden
        return (parameters - layers * layer - hidden) // (2 * hidden)

    hidden = min(
        (hidden for hidden in range(64, 16_385, 64) if vocabulary(hidden) >= 64),
        key=lambda hidden: abs(vocabulary(hidden) - 32_000),
        default=64,
    )
    rows = max(64, vocabulary(hidden) // 64 * 64)
    layers, ffn, dkv = max(1, hidden // 128), hidden * 7 // 2, hidden // 4
    weights: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (rows, hidden))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights += [
            (f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)),
            (f"{prefix}.self_attn.k_proj.weight", (dkv, hidden)),
            (f"{prefix}.self_attn.v_proj.weight", (dkv, hidden)),
            (f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)),
            (f"{prefix}.mlp.gate_proj.weight", (ffn, hidden)),
            (f"{prefix}.mlp.up_proj.weight", (ffn, hidden)),
            (f"{prefix}.mlp.down_proj.weight", (hidden, ffn)),
            (f"{prefix}.input_layernorm.weight", (hidden,)),
            (f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        ]
    weights += [("model.norm.weight", (hidden,)), ("lm_head.weight", (rows, hidden))]
    description = (
        f"Llama-shaped: hidden {hidden}, {layers} layers, vocabulary {rows:,}; "
        "bf16 weights, fp32 exp_avg and exp_avg_sq, scalar steps"
    )
    return _training_run("llama", description, weights, torch.bfloat16)


def _gpt2(layers: int = 12, vocabulary: int = 50_257) -> StateSpec:
    """GPT-2 small in fp32 with AdamW after one step; the output head is tied to the embedding."""
    hidden = 768
    weights: list[tuple[str, tuple[int, ...]]] = [
        ("transformer.wte.weight", (vocabulary, hidden)),
        ("transformer.wpe.weight", (1024, hidden)),
    ]
    for layer in range(layers):
        prefix = f"transformer.h.{layer}"
        weights += [
            (f"{prefix}.ln_1.weight", (hidden,)),
            (f"{prefix}.ln_1.bias", (hidden,)),
            (f"{prefix}.attn.c_attn.weight", (hidden, 3 * hidden)),
            (f"{prefix}.attn.c_attn.bias", (3 * hidden,)),
            (f"{prefix}.attn.c_proj.weight", (hidden, hidden)),
            (f"{prefix}.attn.c_proj.bias", (hidden,)),
            (f"{prefix}.ln_2.weight", (hidden,)),
            (f"{prefix}.ln_2.bias", (hidden,)),
            (f"{prefix}.mlp.c_fc.weight", (hidden, 4 * hidden)),
            (f"{prefix}.mlp.c_fc.bias", (4 * hidden,)),
            (f"{prefix}.mlp.c_proj.weight", (4 * hidden, hidden)),
            (f"{prefix}.mlp.c_proj.bias", (hidden,)),
        ]
    weights += [("transformer.ln_f.weight", (hidden,)), ("transformer.ln_f.bias", (hidden,))]
    description = (
        f"GPT-2 small: {layers} layers, vocabulary {vocabulary:,}, tied head; "
        "fp32, AdamW after one step"
    )
    tie: Path = ("model", "lm_head.weight")
    return _training_run(
        "gpt2", description, weights, torch.float32, ties={tie: ("model", weights[0][0])}
    )


def _small(count: int) -> StateSpec:
    """Many tensors of 64 B to 4 KiB, evenly spread."""
    chance = random.Random(7)
    tensors = [
        TensorSpec(("table", f"entry.{index:06d}"), (chance.randint(16, 1024),), torch.float32)
        for index in range(count)
    ]
    return StateSpec("small", f"{count:,} fp32 tensors of 64 B to 4 KiB", tensors)


def _training_run(
    name: str,
    description: str,
    weights: list[tuple[str, tuple[int, ...]]],
    dtype: torch.dtype,
    ties: dict[Path, Path] | None = None,
) -> StateSpec:
    """Weights, and Adam's state as `torch.optim.AdamW.state_dict` has it."""
    tensors = [TensorSpec(("model", weight), shape, dtype) for weight, shape in weights]
    for index, (_, shape) in enumerate(weights):
        place: Path = ("optimizer", "state", index)
        tensors += [
            TensorSpec((*place, "step"), (), torch.float32),
            TensorSpec((*place, "exp_avg"), shape, torch.float32),
            TensorSpec((*place, "exp_avg_sq"), shape, torch.float32),
        ]
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    values: dict[Path, Any] = {
        ("optimizer", "param_groups"): [{**group, "params": list(range(len(weights)))}],
        ("step",): 1,
    }
    return StateSpec(name, description, tensors, ties or {}, values)
