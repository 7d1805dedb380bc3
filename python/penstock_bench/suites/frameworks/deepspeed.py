"""For how long training waits for ``save_checkpoint``: DeepSpeed's own engine, and Penstock's.

    python -m penstock_bench.suites.frameworks.deepspeed --rounds 7

ZeRO 1 in bfloat16 with AdamW, 0.5 GB on the CPU, one process. In each round every way saves once,
in turn. The stall is the call, and what the step behind it takes longer than the median of steps
without a save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from penstock.integrations.deepspeed.checkpoint_engine import attach

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
        usual = statistics.median(self.step() for _ in range(3))
        began = time.perf_counter()
        self.engine.save_checkpoint(str(directory), tag="tag")
        called = time.perf_counter() - began
        stall = called + max(self.step() - usual, 0)
        if self.is_ours:
            # What is under way is none of the next one's business; a save that failed raises here.
            self.engine.checkpoint_engine.wait()
        shutil.rmtree(directory)
        return stall


def begin() -> None:
    """DeepSpeed for this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_ADDR="127.0.0.1")
    # An op of its own for collectives, which it would compile at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")


def main() -> None:
    """Prints a line for each way, and before, as it takes minutes, each of its rounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to save; the system's by default")
    arguments = parser.parse_args()
    begin()
    root = Path(tempfile.mkdtemp(dir=arguments.directory))
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    try:
        runs = {name: Run(how) for name, how in WAYS.items()}
        for number in range(arguments.rounds + 1):
            for name, run in runs.items():
                seconds = run.stall(root / name)
                sys.stderr.write(f"round {number}: {name} {seconds:.3f} s\n")
                if number:
                    # The first one of each takes memory and imports.
                    found[name].append(seconds)
    finally:
        shutil.rmtree(root)
    own = found["deepspeed"]
    for name, stalls in found.items():
        ratios = [one / other for one, other in zip(stalls, own, strict=True)]
        print(  # noqa: T201
            f"{name:12} {statistics.median(stalls):.3f} s "
            f"[{min(stalls):.3f}, {max(stalls):.3f}], ratio {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f}, {max(ratios):.2f}]"
        )


if __name__ == "__main__":
    main()
