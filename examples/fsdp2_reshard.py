"""FSDP2 on several ranks, saved in the background; resumes on as many ranks as you have.

    torchrun --nproc-per-node 4 examples/fsdp2_reshard.py
    torchrun --nproc-per-node 2 examples/fsdp2_reshard.py --steps 200    # the same run, on two
All ranks write their parts into one checkpoint. On the same number of ranks a resume is exact to
the bit. On another number each rank reads its own part of the saved values only; training then sums
gradients in another order. Runs on the CPU (gloo) as it is; on GPUs, move the model and use the
backend ``cpu:gloo,cuda:nccl``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import penstock

WIDTH = 256
BATCH = 32  # of all ranks together, so it is the same on any number of them


class Model(nn.Module):
    """Layers with dropout; each rank draws its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, width) to the same shape."""
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return x


class Training:
    """All state that has to survive a crash."""

    def __init__(self) -> None:
        torch.manual_seed(0)  # the same weights on every rank
        self.model = Model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(1 + dist.get_rank())  # each rank draws its own dropout
        self.step = 0
        self.average_loss = torch.zeros(())

    def state(self) -> dict[str, Any]:
        """Returns the current state; tensors are not copied."""
        return {
            # DTensors: each rank saves and loads its own part.
            "model": get_model_state_dict(self.model),
            # By parameter names, which mean the same on any number of ranks.
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "step": self.step,
            # The state of a random generator always belongs to one rank.
            "random": torch.get_rng_state(),
            # Other plain tensors are assumed to be the same on all ranks unless they are marked.
            "average_loss": penstock.PerRank(self.average_loss),
        }

    def resume(self, store: penstock.CheckpointStore) -> None:
        """Loads the newest complete step."""
        # `into` gives the current sharding. Its tensors are filled in place.
        state = store.load(into=self.state())
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["random"])

    def train_step(self) -> None:
        """One step on this rank's share of the batch."""
        self.step += 1
        # The batch depends on the step alone, on any number of ranks.
        generator = torch.Generator().manual_seed(self.step)
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        share = batch.chunk(dist.get_world_size())[dist.get_rank()]
        loss = (self.model(share) - share.flip(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.average_loss.mul_(0.9).add_(loss.detach(), alpha=0.1)


def main() -> None:
    """Trains, from the newest step if there is one."""
    arguments = parse()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training()

    # The store is collective: each rank calls the same methods in the same order.
    with penstock.CheckpointStore(arguments.directory, keep_last=3) as store:
        if store.latest() is not None:
            training.resume(store)
            tell(f"resumed from step {training.step}: digest {digest(training)}")
        while training.step < arguments.steps:
            training.train_step()
            tell(f"step {training.step}: average loss {training.average_loss.item():.4f}")
            if training.step % arguments.every == 0 or training.step == arguments.steps:
                # Returns once this rank's part is copied; the write and commit run in the
                # background.
                pending = store.save_async(training.step, training.state())
                tell(
                    f"saving step {training.step}: "
                    f"training waited {pending.stall_seconds * 1e3:.1f} ms"
                )
    tell(f"digest {digest(training)}")
    dist.destroy_process_group()


def digest(training: Training) -> str:
    """SHA-256 over the whole model and optimizer: the same on any number of ranks."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, DTensor):
            part = part.full_tensor()
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

    state = training.state()
    add([state["model"], state["optimizer"]])
    return found.hexdigest()


def tell(text: str) -> None:
    """Prints a line, once for all ranks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "fsdp2-reshard"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
