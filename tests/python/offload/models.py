"""Tiny models of transformers of several families, saved as their users do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, dtype=torch.bfloat16),
    "llama, tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=300),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        vocab_size=300,
        word_embed_proj_dim=64,
    ),
    "bert": lambda: transformers.BertConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        vocab_size=300,
        architectures=["BertForMaskedLM"],
    ),
}


def saved(directory: Path, kind: str) -> Any:
    """A model in memory, and its files in several shards."""
    torch.manual_seed(7)
    config = CONFIGS[kind]()
    auto = (
        transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    )
    auto.from_config(config).save_pretrained(directory, max_shard_size="200KB")
    return auto.from_pretrained(directory).eval()
