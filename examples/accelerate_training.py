"""A run of Hugging Face Accelerate that Penstock saves, and that resumes after a kill.

    python examples/accelerate_training.py
    torchrun --nproc-per-node 2 examples/accelerate_training.py

`attach` is the only line about Penstock. Start the program again after a kill: it resumes from its
newest complete checkpoint, also in the middle of an epoch, and ends with the bits of an
uninterrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn

import penstock
from penstock.integrations.accelerate import attach

WIDTH = 64
SAMPLES = 208
BATCH = 16


class Progress:
    """State of this program that Accelerate does not save by itself."""

    def __init__(self) -> None:
        self.step, self.loss = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain values."""
        return {"step": self.step, "loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state."""
        self.step, self.loss = state["step"], state["loss"]


def begin(directory: str) -> Accelerator:
    """Returns an accelerator that keeps the three newest checkpoints."""
    project = ProjectConfiguration(
        project_dir=directory, automatic_checkpoint_naming=True, total_limit=3
    )
    data = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=data)
    return attach(accelerator, background=True, lazy=True)


def main() -> None:
    """Trains to the end."""
    arguments = parse()
    # These settings make a run repeatable to the last bit. Saving needs none of them.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    accelerator = begin(arguments.directory)
    set_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    samples = torch.sin(torch.arange(SAMPLES)[:, None] * torch.arange(1, WIDTH + 1) / 7)
    loader = torch.utils.data.DataLoader(samples, batch_size=BATCH, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    try:
        accelerator.load_state()
        accelerator.print(f"resumed from step {progress.step}", flush=True)
    except penstock.errors.CheckpointNotFoundError:
        accelerator.print("a new run", flush=True)
        set_seed(1, device_specific=True)  # each rank draws its own dropout

    while progress.step < arguments.steps:
        for batch in loader:
            loss = (model(batch) - batch.flip(1)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            progress.step += 1
            progress.loss = 0.9 * progress.loss + 0.1 * loss.item()
            accelerator.print(f"step {progress.step}: loss {progress.loss:.4f}", flush=True)
            if progress.step % arguments.every == 0:
                accelerator.save_state()
            if progress.step == arguments.steps:
                break

    found = digest([model.state_dict(), optimizer.state_dict()])
    accelerator.print(f"digest {found}", flush=True)
    # gloo's threads release a collective's tensors shortly after it returns (pytorch#190489).
    time.sleep(0.1)
    accelerator.end_training()


def digest(state: Any) -> str:
    """SHA-256 over all tensors and values."""
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
        else:
            found.update(repr(part).encode())

    add(state)
    return found.hexdigest()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "accelerate"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
