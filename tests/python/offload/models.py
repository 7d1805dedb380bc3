"""Tiny models of transformers of several families, saved as users do, and their memory needs."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock import offload

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


def saved(directory: Path, config: Any, max_shard_size: str = "200KB", seed: int = 7) -> Any:
    """Saves a model in several shards; returns it in memory."""
    torch.manual_seed(seed)
    is_masked = config.architectures == ["BertForMaskedLM"]
    auto = transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(directory, max_shard_size=max_shard_size)
    return auto.from_pretrained(directory).eval()


@functools.cache
def least(directory: Path, **how: Any) -> int:
    """Returns the smallest budget that works, as the error names it."""
    with pytest.raises(ValueError, match="is the least that works") as caught:
        offload.stream(directory, memory_bytes=1, **how)
    return int(re.findall(r"(\d+) is the least", str(caught.value))[0])
