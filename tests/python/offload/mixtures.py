"""Tiny mixtures of experts of several families, and helpers to call them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import models
import pytest
import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    **models.SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 200,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    # The files hold experts one by one, the model a layer's experts in one parameter.
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=6, dtype=torch.bfloat16
    ),
    "qwen2": lambda: transformers.Qwen2MoeConfig(
        **SMALL,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=12,
        num_experts_per_tok=4,
        tie_word_embeddings=True,
    ),
    "qwen3": lambda: transformers.Qwen3MoeConfig(
        **SMALL,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=1,
        head_dim=16,
        dtype=torch.bfloat16,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **{**SMALL, "intermediate_size": 16}, num_experts=8, num_experts_per_tok=8
    ),
    "deepseek 3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, **LATENT, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        dtype=torch.bfloat16,
    ),
    # The files, too, hold a layer's experts in one tensor, with biases.
    "gpt oss": lambda: transformers.GptOssConfig(
        **SMALL, num_local_experts=6, num_experts_per_tok=2, head_dim=16
    ),
    "granite": lambda: transformers.GraniteMoeConfig(
        **SMALL, num_local_experts=6, num_experts_per_tok=2
    ),
    # All experts compute on all tokens.
    "llama 4": lambda: transformers.Llama4TextConfig(
        **SMALL, intermediate_size_mlp=48, num_local_experts=4, head_dim=16
    ),
}


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens).logits


def chosen_by(model: Any, tokens: torch.Tensor) -> list[int]:
    """Returns the number of experts that each layer of a model in memory uses."""
    counts = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: counts.append(len(args[1].unique())))
        for module in model.modules()
        if hasattr(module, "has_gate")
    ]
    logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return counts


def change_files(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    for path in directory.glob("*.safetensors"):
        content = load_file(path)
        change(content)
        save_file(content, path, metadata={"format": "pt"})
