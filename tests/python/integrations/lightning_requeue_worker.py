"""One rank of a job that Slurm signals before its end, and requeues.

    python lightning_requeue_worker.py DIRECTORY train|shard|validate

The signal reaches one rank before the ranks communicate, and the others after it. Prints ``name
value`` lines on rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightnings import Module, dataset, fit, trainer
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from penstock.errors import PenstockWarning
from penstock.integrations.lightning import PenstockIO, PenstockModelParallelStrategy

RANK, RANKS = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
STEP_SIGNALLED = 2


class Signalled(Module):
    """Sends the signal once, in the middle of a batch."""

    has_come = False

    def training_step(self, batch, index):
        self.signal_if(RANK == 0 and self.trainer.global_step == STEP_SIGNALLED)
        return super().training_step(batch, index)

    def on_before_optimizer_step(self, optimizer):
        self.signal_if(RANK != 0 and self.trainer.global_step == STEP_SIGNALLED)

    def validation_step(self, batch, index):
        self.signal_if(index == RANK)
        dist.all_reduce(torch.ones(1))

    def signal_if(self, is_time):
        if is_time and not self.has_come and self.trainer.ckpt_path is None:
            self.has_come = True
            os.kill(os.getpid(), signal.SIGUSR1)


class Sharded(Signalled):
    """Shards the parameters over the ranks."""

    def configure_model(self):
        if not hasattr(self.net, "unshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def loader():
    data = dataset()
    sampler = StatefulDistributedSampler(data, num_replicas=RANKS, rank=RANK, shuffle=True)
    return StatefulDataLoader(data, batch_size=2, sampler=sampler)


def tell(*words):
    if RANK == 0:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


def main():
    torch.set_num_threads(1)
    directory, phase = Path(sys.argv[1]), sys.argv[2]
    strategy = DDPStrategy(process_group_backend="gloo")
    if phase == "shard":
        strategy = PenstockModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    io = PenstockIO(background=True, groups={"state_dict.net": ""}, files={"config.json": b"{}"})
    options = {"strategy": strategy, "devices": RANKS, "use_distributed_sampler": False}
    one = trainer(directory, SLURMEnvironment(), io, epochs=2, **options)
    module = Sharded() if phase == "shard" else Signalled()
    if phase == "validate":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one.validate(module, DataLoader(dataset(), batch_size=5), verbose=False)
    else:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", PenstockWarning)
            fit(one, module, loader())
        warned = [each.message for each in told if each.category is PenstockWarning]
        tell("begun", min(module.losses))
        tell("warned", warned)
    parameters = module.net.state_dict().values()
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in parameters]
    tell("sum", sum(one.double().sum().item() for one in whole))
    dist.barrier()
    dist.destroy_process_group()


main()
