"""Runs of examples/torchtitan_training.py, in this process and on ranks."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager

from penstock.integrations.torchtitan import Checkpointer


@cache
def example() -> Any:
    """Imports the program as a module."""
    path = Path(__file__).resolve().parents[2] / "examples" / "torchtitan_training.py"
    spec = importlib.util.spec_from_file_location("example_torchtitan", path)
    module = importlib.util.module_from_spec(spec)
    # By its name: workers of a loader import its classes.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def begun(base: Any, *, of: Any = Checkpointer, layers: int = 1, workers: int = 0, **fields: Any):
    """Returns a run whose checkpoints are in ``base/checkpoint``; ``interval`` defaults to 2."""
    torch.set_num_threads(1)
    fields = {"interval": 2, "keep_latest_k": 0, "last_save_model_only": False} | fields
    config = of.Config(enable=True, **fields)
    return example().Run(str(base), config, layers=layers, workers=workers)


def trained(folder: Any, steps: int, **further: Any) -> list[float]:
    """Resumes a run from its newest checkpoint, if any; returns the losses up to a step."""
    run = begun(folder, **further)
    run.checkpointer.load(step=-1)
    try:
        return list(run.train(steps))
    finally:
        end(run)


def end(run: Any) -> None:
    """Ends a run and its loader's workers, which would outlive it by seconds."""
    run.checkpointer.close()
    iterator = run.dataloader._iterator
    if run.dataloader.num_workers and iterator is not None:
        iterator._shutdown_workers()


# On ranks.


def rank_losses(folder: str, steps: int, is_own: bool, **further: Any) -> list[float]:
    """Returns the losses on one rank, by torchtitan's own manager or Penstock's."""
    return trained(folder, steps, of=CheckpointManager if is_own else Checkpointer, **further)


def rank_step(folder: str) -> int:
    """Returns the step from which a run resumes on this rank."""
    run = begun(folder)
    assert run.checkpointer.load(step=-1)
    run.checkpointer.close()
    return int(run.step)
