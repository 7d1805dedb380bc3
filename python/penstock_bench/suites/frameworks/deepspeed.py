"""How long training waits for ``save_checkpoint``: DeepSpeed's own engine, and Penstock's.

    python -m penstock_bench.suites.frameworks.deepspeed --rounds 7

ZeRO 1 in bfloat16 with AdamW, 0.5 GB on the CPU, one process. In each round every way saves once,
in turn. The stall is the call, and what the step behind it takes longer than the median of steps
without a save.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from typing import TYPE_CHECKING, Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from penstock.integrations.deepspeed.checkpoint_engine import attach
from penstock_bench.harness.process import launch_alone
from penstock_bench.suites.frameworks.waits import WAIT, Found, by_turns, command, stall

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 4096
LAYERS = 2
WAYS: dict[str, dict[str, Any] | None] = {
    "deepspeed": None,
    "background": {"background": True},
    "lazy": {"background": True, "lazy": True},
}


class Run:
    """One engine, saved in one way."""

    def __init__(self, how: dict[str, Any] | None) -> None:
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*layers)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 20_000_000},
            "bf16": {"enabled": True},
        }
        self.engine: Any = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        self.is_ours = how is not None
        if how is not None:
            attach(self.engine, **how)
        self.step()

    def step(self) -> float:
        """Seconds of a step of the optimizer."""
        self.engine.backward(self.engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum())
        began = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - began

    def stall(self, directory: Path) -> float:
        """Seconds that training waits for one save."""
        save = functools.partial(self.engine.save_checkpoint, str(directory), tag="tag")
        seconds = stall(self.step, save)
        if self.is_ours:
            # A save must not run on during the next one; one that failed raises here.
            self.engine.checkpoint_engine.wait()
        shutil.rmtree(directory)
        return seconds


@command("deepspeed", rounds_usual=5)
def main(place: Path, rounds: int) -> tuple[str, Found]:
    """Save with DeepSpeed's ``save_checkpoint``, by its own engine and by Penstock's."""
    launch_alone()
    # DeepSpeed has an op of its own for collectives, which it would compile at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    runs = {name: Run(how) for name, how in WAYS.items()}
    return f"ZeRO 1, {LAYERS} layers of {WIDTH} x {WIDTH}", by_turns(
        list(runs), rounds, lambda name, _: {WAIT: runs[name].stall(place / name)}
    )


if __name__ == "__main__":
    main()
