"""Trains with ZeRO-3 on the CPU, parameters and optimizer on storage, and prints the losses.

    python zero_infinity.py DIRECTORY DEVICE

DEVICE is where they are, `nvme` or `cpu`. After half of the steps a checkpoint is saved, and at the
end a second engine resumes from it. All losses are printed as JSON, with the number of bytes
swapped out. DeepSpeed's own test of this uses half precision, and so needs a processor that
multiplies it; bfloat16 does not.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import Init

HIDDEN = 2048
STEPS = 2


def config_of(directory: Path, device: str) -> dict[str, Any]:
    """Returns DeepSpeed's configuration."""
    place = {"device": device, "nvme_path": str(directory / "zero")}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "sub_group_size": 100,
            "stage3_max_live_parameters": 100,
            "stage3_param_persistence_threshold": 0,
        },
        # Smaller tensors are not offloaded.
        "aio": {"block_size": 1 << 20},
    }


def build(config: dict[str, Any]) -> Any:
    """Returns an engine with a model of its own."""
    torch.manual_seed(123)
    Init.param_id = 0
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(*[torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def train(engine: Any, steps: range) -> list[float]:
    """Returns each step's loss."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        batch = torch.randn(4, HIDDEN, dtype=torch.bfloat16)
        loss = torch.nn.functional.mse_loss(engine(batch).float(), batch.float())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(directory: Path, device: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_PORT=str(port))
    deepspeed.init_distributed("gloo")
    config = config_of(directory, device)

    engine = build(config)
    losses = train(engine, range(STEPS))
    engine.save_checkpoint(str(directory / "checkpoint"))
    losses += train(engine, range(STEPS, 2 * STEPS))
    engine.destroy()

    resumed = build(config)
    resumed.load_checkpoint(str(directory / "checkpoint"))
    again = train(resumed, range(STEPS, 2 * STEPS))
    resumed.destroy()
    swapped = sum(file.stat().st_size for file in (directory / "zero").rglob("*") if file.is_file())
    found = {"losses": losses, "resumed": again, "swapped_bytes": swapped}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
