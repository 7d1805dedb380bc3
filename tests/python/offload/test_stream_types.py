"""Streamed models of transformers have the dtypes and ties of loaded ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mixtures import CONFIGS, change_files
from models import SMALL, least

from penstock import offload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

transformers = pytest.importorskip("transformers")


def check_is_as_loaded(directory: Path, auto: Any, call: Callable[[Any], torch.Tensor]) -> None:
    torch.manual_seed(3)
    model = auto.from_pretrained(directory).eval()
    for memory_bytes in (least(directory), 1 << 28):
        streamed = offload.stream(directory, memory_bytes=memory_bytes)
        types = {name: one.dtype for name, one in model.state_dict(keep_vars=True).items()}
        found = {
            **dict(streamed.named_parameters(remove_duplicate=False)),
            **dict(streamed.named_buffers()),
        }
        assert {name: one.dtype for name, one in found.items() if name in types} == types
        with torch.inference_mode():
            assert torch.equal(call(streamed), call(model))


def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(3, 20).view(1, -1)).logits


def test_without_a_type_in_the_configuration_it_is_that_of_the_files(tmp_path: Path) -> None:
    auto = transformers.AutoModelForCausalLM
    config = transformers.LlamaConfig(**SMALL, dtype=torch.bfloat16)
    auto.from_config(config).save_pretrained(tmp_path, max_shard_size="200KB")
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({k: v for k, v in json.loads(path.read_text()).items() if "dtype" not in k})
    )
    check_is_as_loaded(tmp_path, auto, logits)


def test_what_is_kept_in_32_bits_is(tmp_path: Path) -> None:
    """A T5 in float16 keeps one matrix of each block in 32 bits."""
    auto = transformers.AutoModelForSeq2SeqLM
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4, vocab_size=300,
        decoder_start_token_id=0, dtype=torch.float16,
    )  # fmt: skip
    auto.from_config(config).save_pretrained(tmp_path)
    tokens = torch.arange(3, 20).view(1, -1)
    check_is_as_loaded(
        tmp_path, auto, lambda model: model(input_ids=tokens, decoder_input_ids=tokens).logits
    )


def test_buffers_that_are_kept_in_32_bits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(CONFIGS["deepseek 3"]())
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.data = torch.randn(buffer.shape, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    check_is_as_loaded(tmp_path, auto, logits)


@pytest.mark.parametrize("is_same", [True, False])
def test_tied_parameters_that_the_files_have_each_of(tmp_path: Path, is_same: bool) -> None:
    auto = transformers.AutoModelForCausalLM
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    auto.from_config(config).save_pretrained(tmp_path)

    def add(content: dict[str, torch.Tensor]) -> None:
        embedding = content["model.embed_tokens.weight"]
        content["lm_head.weight"] = embedding.clone() if is_same else -embedding

    change_files(tmp_path, add)
    check_is_as_loaded(tmp_path, auto, logits)
