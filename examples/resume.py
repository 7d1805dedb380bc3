"""A run that resumes after a kill, after damage, and after preemption by the scheduler.

    python examples/resume.py                                    # one process
    torchrun --nproc-per-node 2 examples/resume.py               # DDP
    torchrun --nproc-per-node 2 examples/resume.py --shard       # FSDP2
    python examples/resume.py --offload                          # moments of AdamW on storage

`penstock.Training` holds all state that has to survive; `CheckpointStore.resume` restores the
newest good step, on any number of ranks; `penstock.on_signal` saves a last time on SIGTERM or
SIGUSR1. Start the program again: on the same number of ranks it ends with the bits of an
uninterrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock
import penstock.offload

WIDTH = 64
SAMPLES = 512
BATCH = 16  # of all ranks together
EXIT_PREEMPTED = 75  # "try again": a job script queues the job once more


class Batches:
    """Shuffled batches that keep their position, which is two numbers."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def __next__(self) -> torch.Tensor:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        indices = order[self.position : self.position + BATCH]
        self.position += BATCH
        if self.position >= SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        batch = torch.sin(indices[:, None] * torch.arange(1, WIDTH + 1) / 7)
        return batch.chunk(dist.get_world_size())[dist.get_rank()] if is_many() else batch

    def state_dict(self) -> dict[str, int]:
        """Returns the position."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Moves to a position."""
        self.epoch, self.position = state["epoch"], state["position"]


def begin(steps: int, *, shard: bool, offload: str | None = None) -> penstock.Training:
    """Builds a new run; it is the same whether or not the run then resumes an old one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
    )
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif is_many():
        model = nn.parallel.DistributedDataParallel(model)
    if offload is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        # Computes the bits of torch.optim.AdamW(..., fused=True), with its moments in files.
        optimizer = penstock.offload.AdamW(model.parameters(), lr=1e-3, directory=offload)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(1 + (dist.get_rank() if is_many() else 0))  # each rank draws its own dropout
    return penstock.Training(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=Batches(), average_loss=0.0
    )


def train_step(training: penstock.Training) -> None:
    """Runs one step; no line here is about saving."""
    batch = next(training.loader)
    loss = (training.model(batch) - batch.flip(1)).square().mean()
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    training.scheduler.step()
    training.average_loss = 0.9 * training.average_loss + 0.1 * loss.item()


def train(store: penstock.CheckpointStore, training: penstock.Training, arguments: Any) -> bool:
    """Trains from the newest good step if there is one; returns whether the run is complete."""
    step = store.resume(training) or 0
    tell(f"resumed from step {step}" if step else "a new run")
    with penstock.on_signal(store, training) as preempted:
        while step < arguments.steps:
            train_step(training)
            step += 1
            tell(f"step {step}: average loss {training.average_loss:.4f}")
            if step % arguments.every == 0:
                store.save_async(step, training, lazy=True)
            if preempted.at(step):
                tell(f"preempted after step {step}")
                return False
    return True


def main() -> None:
    """Trains to the end, or until a signal arrives."""
    arguments = parse()
    # These settings make a run repeatable to the last bit. Saving needs none of them.
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    offload = f"{arguments.directory}-moments" if arguments.offload else None
    training = begin(arguments.steps, shard=arguments.shard, offload=offload)
    with penstock.CheckpointStore(arguments.directory, keep_last=3) as store:
        is_done = train(store, training, arguments)
    if is_done:
        tell(f"digest {digest(training)}")
    if is_many():
        # gloo's threads release a collective's tensors shortly after it returns (pytorch#190489).
        time.sleep(0.1)
        dist.destroy_process_group()
    sys.exit(0 if is_done else EXIT_PREEMPTED)


def digest(training: penstock.Training) -> str:
    """SHA-256 over the whole model and optimizer."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        # Reads a moment from its file; for a DTensor, this rank's part.
        part = part.read() if hasattr(part, "read") else part
        if isinstance(part, torch.Tensor):
            part = part.full_tensor() if hasattr(part, "full_tensor") else part
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

    state = training.state_dict()
    add([state["model"], state["optimizer"], state["scheduler"], state["loader"]])
    return found.hexdigest()


def is_many() -> bool:
    """Whether this is one of many ranks."""
    return dist.is_initialized()


def tell(text: str) -> None:
    """Prints a line, once for all ranks."""
    if not is_many() or dist.get_rank() == 0:
        print(text, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "resume"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--offload", action="store_true", help="moments beside the directory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
