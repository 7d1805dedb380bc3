"""Ray Train: checkpoints are written to Ray's storage directly, without an upload.

    python examples/ray_training.py                     # local mode, in this process
    python examples/ray_training.py --workers 2         # two workers of Ray, DDP over gloo

Killed at any moment and started again, it resumes from the newest complete checkpoint, and ends
with the bits of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn

import penstock
from penstock.integrations.ray import repair, report, resume

WIDTH = 64
SAMPLES = 512
BATCH = 16  # of all workers together


class Batches:
    """Shuffled batches that keep their position."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def __next__(self) -> torch.Tensor:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        indices = order[self.position : self.position + BATCH]
        self.position += BATCH
        if self.position >= SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        batch = torch.sin(indices[:, None] * torch.arange(1, WIDTH + 1) / 7)
        context = ray.train.get_context()
        return batch.chunk(context.get_world_size())[context.get_world_rank()]

    def state_dict(self) -> dict[str, int]:
        """Returns the position."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Moves to a position."""
        self.epoch, self.position = state["epoch"], state["position"]


def train(arguments: dict[str, Any]) -> None:
    """The function that every worker runs."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
    )
    if ray.train.get_context().get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + ray.train.get_context().get_world_rank())
    training = penstock.Training(model=model, optimizer=optimizer, loader=Batches())

    # In local mode Ray does not give the run's directory.
    root = arguments["directory"]
    step = resume(training, storage_path=root) or 0
    tell(f"resumed from step {step}" if step else "a new run")
    while step < arguments["steps"]:
        batch = next(training.loader)
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        tell(f"step {step}: loss {loss.item():.4f}")
        if step % arguments["every"] == 0:
            metrics = {"loss": loss.item(), "step": step}
            report(metrics, training, step=step, background=True, storage_path=root)
    tell(f"digest {digest(training)}")


def digest(training: penstock.Training) -> str:
    """SHA-256 over the model and the optimizer's moments."""
    found = hashlib.sha256()
    moments = training.optimizer.state_dict()["state"]
    for tensor in (
        *training.model.parameters(),
        *(m for s in moments.values() for m in s.values()),
    ):
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def tell(text: str) -> None:
    """Prints a line, once for all workers."""
    if ray.train.get_context().get_world_rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Trains to the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "ray"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    directory = os.path.abspath(arguments.directory)
    # A crash may have truncated Ray's list of checkpoints.
    repair(os.path.join(directory, "run"))
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={**vars(arguments), "directory": directory},
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=directory,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3),
            failure_config=ray.train.FailureConfig(max_failures=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
