"""A run that goes on after a kill, after damage, and after the scheduler took its machines back.

    python examples/resume.py                                    # one process
    torchrun --nproc-per-node 2 examples/resume.py               # DDP
    torchrun --nproc-per-node 2 examples/resume.py --shard       # FSDP2
    python examples/resume.py --offload                          # moments of AdamW on storage

`penstock.Training` holds everything that has to survive; `CheckpointStore.resume` brings it to the
newest good step, on any number of ranks; `penstock.on_signal` makes a last save when SIGTERM or
SIGUSR1 comes. Start it again: on as many ranks it ends with the bits that it would have ended with.
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
EXIT_PREEMPTED = 75  # "try again": what a job script asks for to queue the job once more


class Batches:
    """Shuffled batches that know their place, which is two numbers."""

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
        """Where it is."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes there."""
        self.epoch, self.position = state["epoch"], state["position"]


def begin(steps: int, *, shard: bool, offload: str | None = None) -> penstock.Training:
    """A new run: what it is built of does not depend on whether it goes on with an old one."""
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
        # The bits of torch.optim.AdamW(..., fused=True), with its moments in files.
        optimizer = penstock.offload.AdamW(model.parameters(), lr=1e-3, directory=offload)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(1 + (dist.get_rank() if is_many() else 0))  # another dropout on each rank
    return penstock.Training(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=Batches(), average_loss=0.0
    )


def train_step(training: penstock.Training) -> None:
    """One step; nothing in it is about saving."""
    batch = next(training.loader)
    loss = (training.model(batch) - batch.flip(1)).square().mean()
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    training.scheduler.step()
    training.average_loss = 0.9 * training.average_loss + 0.1 * loss.item()


def train(store: penstock.CheckpointStore, training: penstock.Training, arguments: Any) -> bool:
    """Trains, from the newest good step if there is one; whether it came to the end."""
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
    """Trains to the end, or until a signal comes."""
    arguments = parse()
    # What makes a run repeatable to the last bit. Saving asks for none of it.
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
        # The threads of gloo let go of a collective's tensors a little after it (pytorch#190489).
        time.sleep(0.1)
        dist.destroy_process_group()
    sys.exit(0 if is_done else EXIT_PREEMPTED)


def digest(training: penstock.Training) -> str:
    """SHA-256 over the model and the optimizer, whole."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        # A moment in a file is read; of a DTensor it is what this rank holds.
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
