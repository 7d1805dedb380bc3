"""Ranks for the tests of `penstock.integrations.dcp.enable`, which call DCP as frameworks do.

Each command saves and loads through code of a framework that passes a ``checkpoint_id`` and nothing
else, and raises if a promise is broken.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import older_torch  # noqa: F401  names of newer versions, before they are imported

# isort: split
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import penstock
from dcp_worker import check, gathered, make_fsdp, make_state
from penstock.errors import IncompleteCheckpointError
from penstock.integrations.dcp import disable, enable


def own_format(path: str, layout: str, step: str) -> None:
    """A checkpoint in DCP's own format."""
    dcp.save(make_state(layout, int(step)), checkpoint_id=path)


def save(path: str, layout: str, step: str) -> None:
    with enable():
        dcp.save(make_state(layout, int(step)), checkpoint_id=path)


def load(path: str, layout: str, step: str) -> None:
    state = make_state(layout, is_blank=True)
    with enable():
        dcp.load(state, checkpoint_id=path)
    check(state, make_state(layout, int(step)))


def save_async(path: str, kind: str) -> None:
    # PyTorch before 2.7 has threads only.
    types: Any = AsyncCheckpointerType
    how = {} if types is None else {"async_checkpointer_type": types[kind.upper()]}
    with enable():
        for step in (1, 2):
            state = make_state("rows", step)
            future = dcp.async_save(state, checkpoint_id=path, **how)
            for tensor in state["model"].values():
                tensor.to_local().fill_(-2)
            future.result()
            dist.barrier()
            assert penstock.verify(path).ok
            load(path, "columns", str(step))
            dist.barrier()
            # `load` has modified it.
            enable()


def alone(path: str) -> None:
    """Each rank alone, to a path of its own, despite a process group."""
    own = f"{path}-{dist.get_rank()}"
    with enable():
        dcp.save({"w": torch.ones(3) * dist.get_rank()}, checkpoint_id=own, no_dist=True)
        state = {"w": torch.zeros(3)}
        dcp.load(state, checkpoint_id=own, no_dist=True)
    assert state["w"][0] == dist.get_rank()


def refuse(path: str, missing: str) -> None:
    """Remains of a save by DCP itself that did not end, or has lost files since."""
    kinds = (IncompleteCheckpointError, dcp.CheckpointException)
    with enable(), pytest.raises(kinds, match=missing):
        dcp.load(make_state("rows", is_blank=True), checkpoint_id=path)


def fabric(path: str) -> None:
    """Lightning Fabric's strategy of model parallelism; Lightning's Trainer calls the same."""
    from lightning.fabric.strategies import model_parallel

    model, optimizer = make_fsdp(1)
    where = Path(path)
    with enable():
        state = {"model": model, "optimizer": optimizer, "steps": 5}
        model_parallel._save_checkpoint(where, state, full_state_dict=False, rank=dist.get_rank())
        dist.barrier()
        other, its_optimizer = make_fsdp(2)
        target = {"model": other, "optimizer": its_optimizer, "steps": 0}
        model_parallel._load_checkpoint(where, target)
    assert target["steps"] == 5
    _same(model, optimizer, other, its_optimizer)
    assert penstock.inspect(path).world_size == dist.get_world_size()


def lightning(path: str) -> None:
    """Two trainings of Lightning's Trainer with FSDP2: the second resumes the first."""
    import lightning as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def configure_model(self) -> None:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def fit(steps: int, **arguments: Any) -> Any:
        torch.manual_seed(0)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=ModelParallelStrategy(dist.get_world_size(), 1),
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 8)), **arguments)
        return trainer

    with enable():
        trainer = fit(4)
        trainer.save_checkpoint(path)
        other = fit(4, ckpt_path=path)
    assert other.global_step == 4
    _same(trainer.model, trainer.optimizers[0], other.model, other.optimizers[0])
    assert penstock.verify(path).ok


def transformers(path: str) -> None:
    """The optimizer of a model that transformers has sharded over ranks."""
    from transformers.distributed.checkpoint import (
        load_optimizer_distributed,
        save_optimizer_distributed,
    )

    model, optimizer = make_fsdp(1)
    _, its_optimizer = other = make_fsdp(2)
    other[0].load_state_dict(model.state_dict())
    with enable():
        save_optimizer_distributed(model, optimizer, path)
        load_optimizer_distributed(other[0], its_optimizer, path)
    _same(model, optimizer, *other)
    assert "optimizer" in penstock.load(path)


def torchtitan(folder: str, mode: str) -> None:
    """torchtitan's own manager, which ignores steps without DCP's `.metadata`."""
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    enable()
    found = [_titan(CheckpointManager, folder, mode, seed) for seed in (1, 2)]
    (manager, model, optimizer), (other, its_model, its_optimizer) = found
    manager.save(1)
    optimizer.step()
    manager.save(2)
    manager.maybe_wait_for_saving()
    dist.barrier()
    assert penstock.verify(f"{folder}/checkpoint/step-2").ok
    assert other.load()
    disable()
    _same(model, optimizer.optimizer, its_model, its_optimizer.optimizer)
    assert other.states["train_state"].at == 7
    for one in (manager, other):
        one.close()


class _Optimizers:
    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self) -> None:
        self.model(torch.ones(4, 6)).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> Any:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        return dcp.state_dict.get_optimizer_state_dict(
            self.model, self.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )

    def load_state_dict(self, state: Any) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        dcp.state_dict.set_optimizer_state_dict(
            self.model,
            self.optimizer,
            optim_state_dict=state,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )


class _Counter:
    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def _titan(kind: Any, folder: str, mode: str, seed: int) -> Any:
    model, optimizer = make_fsdp(seed)
    optimizers = _Optimizers(model, optimizer)
    manager = kind(
        kind.Config(
            enable=True, interval=1, async_mode=mode, keep_latest_k=0, last_save_model_only=False
        ),
        dataloader=_Counter(3 if seed == 1 else 0),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=_Counter(4 if seed == 1 else 0),
        states={"train_state": _Counter(7 if seed == 1 else 0)},
        sd_adapter=None,
        base_folder=folder,
    )
    return manager, model, optimizers


def accelerate(path: str) -> None:
    """FSDP2 of accelerate, which passes DCP's classes when it saves and loads."""
    from accelerate import PartialState
    from accelerate.utils import fsdp_utils
    from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin

    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="no_wrap"
    )
    ranks = argparse.Namespace(
        process_index=dist.get_rank(), num_processes=2, wait_for_everyone=dist.barrier
    )
    model, optimizer = make_fsdp(1)
    other, its_optimizer = make_fsdp(2)
    with enable(file_system_writer=True):
        fsdp_utils.save_fsdp_model(plugin, ranks, model, path)
        fsdp_utils.save_fsdp_optimizer(plugin, ranks, optimizer, model, path)
        fsdp_utils.load_fsdp_model(plugin, ranks, other, path)
        fsdp_utils.load_fsdp_optimizer(plugin, ranks, its_optimizer, other, path)
    _same(model, optimizer, other, its_optimizer)
    for name in (FSDP_MODEL_NAME, OPTIMIZER_NAME):
        assert penstock.verify(f"{path}/{name}_0").ok


def _same(model: Any, optimizer: Any, other: Any, its_optimizer: Any) -> None:
    found, expected = (
        get_state_dict(*pair) for pair in ((other, its_optimizer), (model, optimizer))
    )
    check(gathered(found[0]), gathered(expected[0]))
    check(gathered(found[1]), gathered(expected[1]))


def replace(path: str) -> None:
    """Saves over a checkpoint of DCP's own, then over its own, until it is killed; alone."""
    with enable():
        for step in itertools.count(1):
            state = {"a": torch.full((300_000,), float(step)), "step": step}
            dcp.save(state, checkpoint_id=path, no_dist=True)
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        replace(sys.argv[1])
    dist.init_process_group("gloo")
    for command in sys.argv[1:]:
        name, *arguments = command.split(":")
        globals()[name](*arguments)
        dist.barrier()
    dist.destroy_process_group()
