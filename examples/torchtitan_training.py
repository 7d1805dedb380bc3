"""A run of torchtitan's Llama 3 with Penstock's checkpoints, which resumes after a kill.

    python examples/torchtitan_training.py                              # one process
    torchrun --nproc-per-node 2 examples/torchtitan_training.py         # FSDP2

In a config function of torchtitan two lines change:

    from penstock.integrations.torchtitan import Checkpointer
    …
    checkpoint=Checkpointer.Config(enable=True, interval=500, async_mode="async_with_pinned_mem"),

torchtitan's `Trainer` requires an accelerator. `Run` stands in for it so that this example runs
anywhere: the debug model of Llama 3, torchtitan's optimizers, schedulers and loader, and the same
calls to the checkpointer in the same places as in `Trainer`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from penstock.integrations.torchtitan import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = 2048
LENGTH = 32
BATCH = 2


class Sentences(IterableDataset):
    """Endless tokens, different on each rank and in each worker, that keep their position."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        number = 1000 * self._rank + (0 if worker is None else worker.id)
        while True:
            self._count += 1
            generator = torch.Generator().manual_seed(1_000_000 * number + self._count)
            yield torch.randint(0, WORDS, (LENGTH + 1,), generator=generator)

    def state_dict(self) -> dict[str, int]:
        """Returns the position."""
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Moves to a position."""
        self._count = state["count"]


class Run:
    """A stand-in for torchtitan's `Trainer`, built of the same parts.

    Args:
        folder: Directory of the checkpoints.
        checkpoint: Configuration of the checkpointer.
        layers: Number of the model's layers.
        workers: Number of the loader's workers.
    """

    def __init__(self, folder: str, checkpoint: Any, *, layers: int = 2, workers: int = 0) -> None:
        rank, size = (dist.get_rank(), dist.get_world_size()) if is_many() else (0, 1)
        torch.manual_seed(0)  # the same weights on every rank
        self.model = build(layers)
        torch.manual_seed(1 + rank)  # each rank masks other words
        adamw = default_adamw(lr=1e-3)
        adamw.implementation = "for-loop"
        self.optimizers = adamw.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=5)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=1000)
        self.dataloader = ParallelAwareDataloader(
            Sentences(rank), rank, size, batch_size=BATCH, num_workers=workers
        )
        self.step = self.ntokens_seen = 0
        self.checkpointer = checkpoint.build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=folder,
        )

    def state_dict(self) -> dict[str, int]:
        """Returns the state that `Trainer` keeps itself."""
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the state."""
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, steps: int) -> Iterator[float]:
        """Trains up to a step; yields each step's loss once its save has begun."""
        batches = iter(self.dataloader)
        while self.step < steps:
            self.step += 1
            loss = self._train_step(next(batches))
            self.checkpointer.save(self.step, last_step=self.step == steps)
            yield loss

    def _train_step(self, batch: torch.Tensor) -> float:
        words, following = batch[:, :-1], batch[:, 1:]
        # Uses the generator that dropout would use.
        words = torch.where(torch.rand(words.shape) < 0.1, 0, words)
        loss = torch.nn.functional.cross_entropy(
            self.model(words).flatten(0, 1), following.flatten()
        )
        self.optimizers.zero_grad()
        loss.backward()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.ntokens_seen += words.numel()
        return float(loss.item())

    def digest(self) -> str:
        """SHA-256 over the whole model, the optimizers, and the position in the data."""
        found = hashlib.sha256()
        states = [self.model.state_dict(), self.optimizers.state_dict()]
        for value in [*states[0].values(), *states[1].values()]:
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found.update(whole.detach().contiguous().flatten().view(torch.uint8).numpy())
            else:
                found.update(repr(value).encode())
        found.update(repr([self.lr_schedulers.state_dict(), self.state_dict()]).encode())
        found.update(self.dataloader.state_dict()[f"dp_rank_{self.dataloader.dp_rank}"])
        return found.hexdigest()


def build(layers: int) -> Any:
    """Builds the debug model, sharded if there are ranks."""
    config = model_registry("debugmodel").model
    config.layers = config.layers[:layers]
    for layer in config.layers:
        # FlexAttention, the default, has to be compiled first.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    with torch.device("meta"):
        model = config.build()
    if is_many():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def main() -> None:
    """Trains to the end, from the newest good step."""
    arguments = parse()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    checkpoint = Checkpointer.Config(
        enable=True,
        folder="checkpoint",
        interval=arguments.every,
        keep_latest_k=3,
        async_mode="async_with_pinned_mem",
        last_save_model_only=False,
    )
    run = Run(arguments.directory, checkpoint)
    is_resumed = run.checkpointer.load(step=-1)
    tell(f"resumed from step {run.step}" if is_resumed else "a new run")
    for loss in run.train(arguments.steps):
        tell(f"step {run.step}: loss {loss:.6f}")
    run.checkpointer.close()
    tell(f"digest {run.digest()}")
    if is_many():
        # gloo's threads release a collective's tensors shortly after it returns (pytorch#190489).
        time.sleep(0.1)
        dist.destroy_process_group()


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
    parser.add_argument("--directory", default=os.path.join("runs", "torchtitan"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
