"""A real but small training: model, optimizer, schedulers, scaler and random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

VOCABULARY = 96
SEED = 20_240

# The models are tiny: threads would wait for each other longer than they compute.
torch.set_num_threads(1)


def gpt2() -> torch.nn.Module:
    """GPT-2 with tied embeddings and dropout."""
    # Takes seconds to import, and only these models need it.
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    )


def llama() -> torch.nn.Module:
    """A Llama with grouped queries, odd sizes, dropout in attention, and no ties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=36,
            intermediate_size=52,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_dropout=0.1,
            tie_word_embeddings=False,
        )
    )


def tied_bfloat16_llama() -> torch.nn.Module:
    """A Llama with tied embeddings in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


MODELS = {"gpt2": gpt2, "llama": llama, "llama-bfloat16-tied": tied_bfloat16_llama}


def schedulers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns schedulers of many kinds, which all drive the one optimizer in this order."""
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=3)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    return {
        "sequential": lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[4]),
        "cosine": lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2),
        "multi_step": lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 7], gamma=0.9),
        "lambda": lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step),
        "cyclic": lr_scheduler.CyclicLR(
            optimizer, 1e-4, 2e-3, step_size_up=3, cycle_momentum=False
        ),
        "one_cycle": lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=50),
        "plateau": lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    }


class Run:
    """One training run whose whole state is `state`."""

    def __init__(self, make_model: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = make_model()
        groups = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, amsgrad=True)
        self.schedulers = schedulers(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.generator = np.random.Generator(np.random.PCG64(seed))
        self.shuffle = random.Random(seed)
        np.random.seed(seed)
        random.seed(seed)

    def step(self) -> str:
        """Runs one step; returns the loss to the last bit."""
        tokens = torch.randint(0, VOCABULARY, (2, 12))
        tokens[0, int(self.generator.integers(12))] = int(np.random.randint(VOCABULARY))
        tokens[1, self.shuffle.randrange(12)] = random.randrange(VOCABULARY)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for name, scheduler in self.schedulers.items():
            if name == "plateau":
                scheduler.step(loss.item())
            else:
                scheduler.step()
        return loss.item().hex()

    def state(self) -> dict[str, Any]:
        """Returns the whole state as PyTorch, NumPy and Python give it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedulers": {name: one.state_dict() for name, one in self.schedulers.items()},
            "scaler": self.scaler.state_dict(),
            "random": {
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state(),
                "numpy_as_dict": np.random.get_state(legacy=False),
                "generator": self.generator.bit_generator.state,
                "python": random.getstate(),
                "shuffle": self.shuffle.getstate(),
            },
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Resumes from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, one in self.schedulers.items():
            one.load_state_dict(state["schedulers"][name])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"]["torch"])
        np.random.set_state(state["random"]["numpy"])
        self.generator.bit_generator.state = state["random"]["generator"]
        random.setstate(state["random"]["python"])
        self.shuffle.setstate(state["random"]["shuffle"])
