"""One rank of runs whose model is sharded: Lightning's strategy, then Penstock's.

    python lightning_worker.py DIRECTORY both|alone

Prints ``name value`` lines on rank 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightnings import Module, fit, trainer
from torch.distributed.fsdp import fully_shard

import penstock
from penstock.integrations.lightning import PenstockIO, PenstockModelParallelStrategy


class Sharded(Module):
    """Shards the parameters over the ranks."""

    def configure_model(self):
        if not hasattr(self.net, "unshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def run(directory, kind, *plugins, epochs, ckpt_path=None):
    ranks = dist.get_world_size() if dist.is_initialized() else int(sys.argv[3])
    strategy = kind(data_parallel_size=ranks, tensor_parallel_size=1)
    callbacks = [ModelCheckpoint(dirpath=directory, save_top_k=-1)]
    options = {"strategy": strategy, "devices": ranks, "callbacks": callbacks}
    return fit(
        trainer(directory, *plugins, epochs=epochs, **options), Sharded(), ckpt_path=ckpt_path
    )


def tell(*words):
    if dist.get_rank() == 0:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


def main():
    torch.set_num_threads(1)
    directory, phase = Path(sys.argv[1]), sys.argv[2]
    ours = directory / "ours"
    if phase == "both":
        run(directory / "theirs", ModelParallelStrategy, epochs=1)
        theirs = directory / "theirs" / "epoch=0-step=3.ckpt"
        tell("theirs", (theirs / ".metadata").is_file())
        try:
            run(directory / "no", ModelParallelStrategy, PenstockIO(), epochs=1)
        except penstock.PenstockError as error:
            tell("refused", error)
        module = run(ours, PenstockModelParallelStrategy, epochs=2, ckpt_path=theirs)
        tell("from", min(module.losses))
    else:
        module = run(
            directory / "alone", PenstockModelParallelStrategy, epochs=2, ckpt_path=ours / phase
        )
    whole = module.net[0].weight.full_tensor()
    tell("sum", whole.double().sum().item())
    dist.barrier()
    dist.destroy_process_group()


main()
