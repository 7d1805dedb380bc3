"""How long training waits for a save of torchtitan: by its own manager, and by Penstock.

    python -m penstock_bench.suites.frameworks.torchtitan --megabytes 900 --rounds 7

One model, Llama 3 of torchtitan with one layer and as many words as make up the size, with its
optimizers. In each round every manager saves after a step, in another order each time, and another
forward and backward follow. The time is that of ``save``, and of ``maybe_wait_for_staging`` just
before the next step: what the loop of the trainer waits for. What goes on in the background ends
before the next one begins. Both make a save durable.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from typing import TYPE_CHECKING, Any

import click
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from penstock.integrations.torchtitan import Checkpointer
from penstock_bench.suites.frameworks.waits import WAIT, Found, by_turns, command

if TYPE_CHECKING:
    from pathlib import Path

_BYTES_PER_PARAMETER = 12  # the weight and two moments, of 4 bytes each
_LENGTH = 16


def _model(megabytes: int) -> Any:
    config = model_registry("1B").model
    config.layers = config.layers[:1]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        layers = sum(one.numel() for one in config.layers[0].build().parameters())
    words = (int(megabytes * 1e6) // _BYTES_PER_PARAMETER - layers) // config.dim
    if words < 1:
        raise click.UsageError(f"--megabytes {megabytes}: the layer alone has more")
    config.vocab_size = config.tok_embeddings.num_embeddings = words
    config.lm_head.out_features = words
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for parameter in model.parameters():
            parameter.uniform_(-0.01, 0.01)
    return model


class _Progress:
    """The trainer's own state."""

    def state_dict(self) -> dict[str, int]:
        return {"step": 0, "ntokens_seen": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def _measure(megabytes: int, rounds: int, directory: Path) -> Found:
    model = _model(megabytes)
    adamw = default_adamw(lr=1e-6)
    adamw.implementation = "for-loop"
    optimizers = adamw.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=100)
    words = torch.arange(_LENGTH)[None] % model.tok_embeddings.weight.shape[0]

    def manager(name: str) -> Any:
        owner = Checkpointer if name.startswith("penstock") else CheckpointManager
        mode = {"async": "async", "lazy": "async_with_pinned_mem"}.get(name.split()[-1], "disabled")
        config = owner.Config(
            enable=True, folder=name.replace(" ", "-"), interval=1, keep_latest_k=0, async_mode=mode
        )
        return config.build(
            dataloader=None,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": _Progress()},
            sd_adapter=None,
            base_folder=str(directory),
        )

    names = ["torchtitan", "torchtitan async", "penstock", "penstock async", "penstock lazy"]
    managers = {name: manager(name) for name in names}

    def measured(name: str, step: int) -> dict[str, float]:
        one = managers[name]
        began = time.perf_counter()
        one.save(step)
        saved = time.perf_counter() - began
        optimizers.zero_grad()
        model(words).float().square().mean().backward()
        began = time.perf_counter()
        one.maybe_wait_for_staging()
        staged = time.perf_counter() - began
        optimizers.step()
        one.maybe_wait_for_saving()
        os.sync()
        shutil.rmtree(directory / name.replace(" ", "-"))
        return {WAIT: saved + staged}

    found = by_turns(names, rounds, measured)
    for one in managers.values():
        one.close()
    return found


@command("torchtitan", "torchtitan async")
@click.option("--megabytes", default=900, show_default=True, help="Of the state, 10**6 bytes each.")
def main(place: Path, rounds: int, megabytes: int) -> tuple[str, Found]:
    """Save a Llama 3 of torchtitan after each step, with every manager."""
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch")
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    found = _measure(megabytes, rounds, place)
    dist.destroy_process_group()
    return f"{megabytes} MB", found


if __name__ == "__main__":
    main()
