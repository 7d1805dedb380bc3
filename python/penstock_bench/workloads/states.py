"""The states that are saved and loaded: shapes of real training runs."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch

from penstock_bench.workloads.content import Path, StateSpec, TensorSpec

GIB = 1 << 30
NAMES = ("llama", "gpt2", "small")

_SMALL_TENSORS = 200_000
_SMALL_TENSORS_TINY = 5_000


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
