"""Mixtures of transformers streamed to a GPU compute the same as in its memory.

The host computes PyTorch's operations (`computing`), with and without the driver for tests.
"""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

from computing import computing
from gpu import same
from penstock import offload
from penstock.tensors import devices

torch.set_num_threads(1)

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LAYERS = 2


def mixtral(how):
    from transformers.models.mixtral import modeling_mixtral as of

    config = transformers.MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2)
    return of.MixtralSparseMoeBlock, chosen_by(config, how)


def qwen(how):
    from transformers.models.qwen3_moe import modeling_qwen3_moe as of

    config = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3
    )
    return of.Qwen3MoeSparseMoeBlock, chosen_by(config, how)


def gpt_oss(how):
    """A mixture with biases, and with transposed matrices."""
    from transformers.models.gpt_oss import modeling_gpt_oss as of

    config = transformers.GptOssConfig(
        **SIZES, num_local_experts=6, num_experts_per_tok=2, head_dim=16
    )
    return of.GptOssMLP, chosen_by(config, how)


def chosen_by(config, how):
    config._experts_implementation = how
    return config


class Stack(torch.nn.Module):
    def __init__(self, kind, config, dtype):
        super().__init__()
        self.blocks = torch.nn.ModuleList(kind(config) for _ in range(LAYERS)).to(dtype)

    def forward(self, x):
        for block in self.blocks:
            made = block(x)
            x = torch.tanh(x + (made[0] if isinstance(made, tuple) else made))
        return x


def written(path, kind, how):
    """Writes weights in a file, in 32 bits."""
    torch.manual_seed(3)
    model = Stack(*kind(how), torch.float32)
    weights = {
        name: torch.empty_like(one).normal_(std=0.3) for name, one in model.named_parameters()
    }
    save_file(weights, path / "model.safetensors")
    return weights


def least(path, model):
    with pytest.raises(ValueError, match="is the least that works") as caught:
        offload.stream(model, weights=path, memory_bytes=1, device="cuda")
    return int(re.findall(r"(\d+) is the least", str(caught.value))[0])


def inputs_of(dtype):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, count, 32, generator=generator).to(dtype) for count in (7, 1)]


@pytest.mark.parametrize(
    ("how", "capability"),
    [("grouped_mm", (9, 0)), ("grouped_mm", (7, 5)), ("batched_mm", (9, 0)), ("eager", (9, 0))],
)
@pytest.mark.parametrize(("kind", "has_driver"), [(mixtral, True), (qwen, False), (gpt_oss, True)])
def test_outputs_have_the_bits_of_those_of_the_model_in_memory(
    gpu, disk_path, monkeypatch, kind, how, has_driver, capability
):
    """With room for two experts and for all; some weights are converted as they arrive."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    if not has_driver:
        monkeypatch.setattr(devices, "is_direct", lambda: False)
    weights = written(disk_path, kind, how)
    for dtype in (torch.float32, torch.bfloat16):
        resident = Stack(*kind(how), dtype)
        for name, one in weights.items():
            owner, _, attribute = name.rpartition(".")
            module = resident.get_submodule(owner)
            module._parameters[attribute] = gpu.put(one.to(dtype))
        smallest = least(disk_path, Stack(*kind(how), dtype))
        for memory_bytes in (smallest, 1 << 24):
            streamed = offload.stream(
                Stack(*kind(how), dtype),
                weights=disk_path,
                memory_bytes=memory_bytes,
                device="cuda",
            )
            with torch.inference_mode(), computing(gpu):
                for x in inputs_of(dtype):
                    expected, found = resident(gpu.put(x)), streamed(gpu.put(x))
                    assert same(gpu.read(found), gpu.read(expected))
            told = offload.report(streamed).experts
            assert told.uses > told.hits > 0 or memory_bytes == smallest
