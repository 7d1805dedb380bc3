"""Checks that the plug-in fits the installed Accelerate."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import StateMismatchError
from penstock.integrations.trial import trial_directory
from penstock.integrations.versions import Probe, self_check

if TYPE_CHECKING:
    from collections.abc import Callable

_PARTS = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
"""The lists of an accelerator that are saved."""

_FURTHER = (
    "_load_model_state_pre_hook",
    "_save_model_state_pre_hook",
    "distributed_type",
    "gradient_state",
    "is_main_process",
    "num_processes",
    "project_dir",
    "save_iteration",
    "scaler",
    "step",
    "sync_gradients",
)
_PROJECT = ("automatic_checkpoint_naming", "iteration", "save_on_each_node", "total_limit")
_LOADER = ("end", "set_epoch", "__iter__")


def check_accelerator(accelerator: Any) -> None:
    """Raises `MissingDependencyError`, with a list, if Accelerate lacks parts the plug-in uses."""
    from accelerate import Accelerator

    probe = Probe("accelerate", "penstock.integrations.accelerate")
    save = probe.attribute(Accelerator, "save_state")
    probe.signature(save, "output_dir", "safe_serialization")
    # A new kind of part would be left out of checkpoints.
    probe.calls(save, *_PARTS[1:])
    load = probe.attribute(Accelerator, "load_state")
    probe.signature(load, "input_dir")
    probe.calls(load, "_models", *_PARTS[1:])
    probe.attribute(Accelerator, "end_training")
    probe.signature(probe.attribute(Accelerator, "get_state_dict"), "model", "unwrap")
    for name in (*_PARTS, *_FURTHER):
        probe.attribute(accelerator, name)
    project = probe.attribute(accelerator, "project_configuration")
    for name in _PROJECT:
        probe.attribute(project, name)
    probe.attribute(probe.attribute(accelerator, "gradient_state"), "dataloader_references")
    loader = probe.attribute("accelerate.data_loader", "DataLoaderShard")
    for name in _LOADER:
        probe.attribute(loader, name)
    # Loaders count their epochs themselves.
    probe.calls(probe.attribute(loader, "__iter__"), "set_epoch", "iteration")
    probe.check()


def try_out(accelerator: Any, root: str, saves_of: Callable[[Any], Any]) -> None:
    """Saves and loads a tiny state, if Accelerate is newer than the versions tested.

    All processes call it.
    """
    self_check("accelerate", lambda: _try_out(accelerator, root, saves_of))


def _try_out(accelerator: Any, root: str, saves_of: Callable[[Any], Any]) -> None:
    with trial_directory(root) as directory:
        tiny = copy.copy(accelerator)
        tiny.project_configuration = copy.copy(accelerator.project_configuration)
        tiny.project_configuration.automatic_checkpoint_naming = False
        tiny._save_model_state_pre_hook, tiny._load_model_state_pre_hook = {}, {}
        model = torch.nn.Linear(1, 1).to(accelerator.device)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 1, device=accelerator.device)).sum().backward()
        optimizer.step()
        for name in _PARTS:
            setattr(tiny, name, [])
        tiny._models, tiny._optimizers = [model], [optimizer]
        saves = saves_of(tiny)
        tiny.save_state, tiny.load_state = saves.save_state, saves.load_state
        path = os.path.join(directory, "state")
        tiny.save_state(path)
        wanted = _values(model, optimizer)
        with torch.no_grad():
            for value in _values(model, optimizer, is_copied=False):
                value.zero_()
        tiny.load_state(path)
        if not all(map(torch.equal, _values(model, optimizer), wanted)):
            raise StateMismatchError(
                f"{path}: a model or an optimizer came back otherwise", key="model", path=path
            )


def _values(model: Any, optimizer: Any, *, is_copied: bool = True) -> list[torch.Tensor]:
    moments = [one["exp_avg"] for one in optimizer.state.values()]
    values = [*model.parameters(), *moments]
    return [one.detach().clone() for one in values] if is_copied else values
