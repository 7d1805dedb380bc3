"""A run of Lightning's Trainer that resumes after a kill, in the middle of an epoch.

    python examples/lightning_training.py                                # one process
    torchrun --nproc-per-node 2 examples/lightning_training.py           # DDP
    torchrun --nproc-per-node 2 examples/lightning_training.py --shard   # FSDP2

Saves run in the background. `PenstockIO`, one line of the Trainer's arguments, is all that is about
Penstock; with ``--shard`` the strategy is Penstock's as well. Start the program again after a kill:
it resumes from the newest complete checkpoint, and ends with the bits of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import warnings
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from penstock.integrations.lightning import PenstockIO, PenstockModelParallelStrategy

WIDTH = 64
SAMPLES = 176  # 11 batches an epoch
BATCH = 16


class Regression(lightning.LightningModule):
    """Learns to reverse its input; draws random numbers of PyTorch, NumPy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(2 * WIDTH, WIDTH),
        )

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Runs one step; no line here is about saving."""
        noise = 1 + 0.01 * (random.random() + np.random.rand())
        loss = (self.net(batch * noise) - batch.flip(1)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, with a rate that falls each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class ShardedRegression(Regression):
    """The regression, with its parameters sharded over the ranks."""

    def configure_model(self) -> None:
        """Shards the model."""
        mesh: Any = self.device_mesh
        if mesh is not None and not hasattr(self.net, "unshard"):
            fully_shard(self.net, mesh=mesh["data_parallel"])


class Teller(lightning.Callback):
    """Prints the run's progress."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Prints where the run begins."""
        step = trainer.global_step
        tell(trainer, f"resumed from step {step}" if step else "a new run")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Prints each step."""
        tell(trainer, f"step {trainer.global_step}: loss {outputs['loss'].item():.6f}")


def samples() -> list[torch.Tensor]:
    """Returns the data."""
    return list(torch.sin(torch.arange(SAMPLES)[:, None] * torch.arange(1, WIDTH + 1) / 7))


def main() -> None:
    """Trains to the end, from the newest complete checkpoint if there is one."""
    arguments = parse()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning|torchdata")
    # These settings make a run repeatable to the last bit. Saving needs none of them.
    torch.set_num_threads(1)
    lightning.seed_everything(int(os.environ.get("RANK", 0)), verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    strategy: Any = "auto"
    if arguments.shard:
        strategy = PenstockModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    elif ranks > 1:
        strategy = DDPStrategy(process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=arguments.steps,
        callbacks=[
            ModelCheckpoint(
                dirpath=arguments.directory,
                every_n_train_steps=arguments.every,
                save_top_k=1,
                save_last="link",
            ),
            Teller(),
        ],
        plugins=[PenstockIO(background=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = ShardedRegression() if arguments.shard else Regression()
    # These keep their position within an epoch; PyTorch's own loader and samplers do not.
    data: Any = samples()
    rank = int(os.environ.get("RANK", 0))
    sampler = StatefulDistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=True)
    loader = StatefulDataLoader(data, batch_size=BATCH // ranks, sampler=sampler)
    trainer.fit(module, loader, ckpt_path="last")
    tell(trainer, f"digest {digest(trainer, module)}")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def digest(trainer: Any, module: Any) -> str:
    """SHA-256 over the whole model and optimizer."""
    found = hashlib.sha256()
    (optimizer,) = trainer.optimizers
    parts = [*module.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        parts += state.values()
    for part in parts:
        whole = part.full_tensor() if hasattr(part, "full_tensor") else part
        found.update(whole.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    found.update(repr(optimizer.state_dict()["param_groups"]).encode())
    return found.hexdigest()


def tell(trainer: Any, text: str) -> None:
    """Prints a line, once for all ranks."""
    if trainer.is_global_zero:
        print(text, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=os.path.join("runs", "lightning"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=4, help="steps between two saves")
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    return parser.parse_args()


if __name__ == "__main__":
    main()
