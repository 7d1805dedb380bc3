"""A run of DeepSpeed that Penstock saves, and that resumes after a kill.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/deepspeed_training.py --stage 3

`enable` is the only line about Penstock. Start the program again after a kill: it resumes from the
tag in ``latest``, and ends with the bits of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed

from penstock.integrations.deepspeed.checkpoint_engine import enable

WIDTH = 64
SAMPLES = 208
BATCH = 8  # of each rank


def begin(stage: int) -> Any:
    """Returns a DeepSpeed engine for a ZeRO stage, on the CPU."""
    # DeepSpeed would compile its own op for collectives at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        # The default bucket is one gigabyte, allocated anew in each step.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
        "bf16": {"enabled": stage > 0},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    torch.manual_seed(1 + dist.get_rank())  # each rank draws its own dropout
    return engine


def batch_of(step: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns this rank's batch for a step; the order is shuffled anew in each epoch."""
    per_epoch = SAMPLES // (BATCH * dist.get_world_size())
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    mine = order.view(-1, BATCH)[place * dist.get_world_size() + dist.get_rank()]
    return torch.sin(mine[:, None] * torch.arange(1, WIDTH + 1) / 7).to(dtype)


def main() -> None:
    """Trains to the end."""
    arguments = parse()
    # These settings make a run repeatable to the last bit. Saving needs none of them.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    enable(background=True, lazy=True)
    engine = begin(arguments.stage)
    path, state = engine.load_checkpoint(arguments.directory)
    step, loss = (state["step"], state["loss"]) if path else (0, 0.0)
    tell(f"resumed from step {step}" if path else "a new run")
    dtype = torch.bfloat16 if arguments.stage else torch.float32
    while step < arguments.steps:
        batch = batch_of(step, dtype)
        current = (engine(batch) - batch.flip(1)).float().square().mean()
        engine.backward(current)
        engine.step()
        step, loss = step + 1, 0.9 * loss + 0.1 * current.item()
        tell(f"step {step}: loss {loss:.4f}")
        if step % arguments.every == 0:
            engine.save_checkpoint(arguments.directory, client_state={"step": step, "loss": loss})
    tell(f"digest {digest(engine)}")
    engine.destroy()
    # gloo's threads release a collective's tensors shortly after it returns (pytorch#190489).
    time.sleep(0.1)
    dist.destroy_process_group()


def digest(engine: Any) -> str:
    """SHA-256 over rank 0's optimizer state, including the weights in full precision."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.update(part.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                add(str(key))
                add(part[key])
        elif isinstance(part, (list, tuple)):
            for item in part:
                add(item)
        elif isinstance(part, (int, float, str)):
            found.update(repr(part).encode())

    add(engine.optimizer.state_dict())
    return found.hexdigest()


def tell(text: str) -> None:
    """Prints a line, once for all ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "deepspeed"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    return parser.parse_args()


if __name__ == "__main__":
    main()
