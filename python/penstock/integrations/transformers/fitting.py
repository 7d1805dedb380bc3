"""Checks that the mix-in fits the installed Trainer, and handles differences between versions.

The mix-in overrides methods that no version promises to keep, and relies on the order of their
calls. Each is looked up in the Trainer before it trains, so that a change raises an error with its
name instead of making incomplete checkpoints.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from penstock.errors import PenstockWarning, StateMismatchError
from penstock.integrations.trial import trial_directory
from penstock.integrations.versions import Probe, self_check

if TYPE_CHECKING:
    from transformers import Trainer

_NAME = re.compile(r"checkpoint-([0-9]+)")

_OVERRIDDEN = {
    "_get_output_dir": ("trial",),
    "_load_best_model": (),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_save": ("output_dir", "state_dict"),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_save_rng_state": ("output_dir",),
    "_save_scaler": ("output_dir",),
    "save_model": ("output_dir", "_internal_call"),
    "train": ("resume_from_checkpoint",),
}
"""Methods that the mix-in overrides, with the parameters that both have."""

_OF_A_SAVE = (
    "_get_output_dir",
    "save_model",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "save_to_json",
)
"""Methods that a save calls, in this order; the mix-in skips those whose part it saves."""

_fitting: set[type] = set()


def check_trainer(trainer: Any) -> None:
    """Raises if a Trainer lacks parts that the mix-in uses; checks each class once."""
    from transformers import Trainer

    if type(trainer) in _fitting:
        return
    probe = Probe("transformers", "penstock.integrations.transformers")
    for name, parameters in _OVERRIDDEN.items():
        probe.signature(probe.attribute(Trainer, name), *parameters)
    probe.attribute(Trainer, "_maybe_log_save_evaluate")
    probe.calls(probe.attribute(Trainer, "_save_checkpoint"), *_OF_A_SAVE)
    _probe_loop(probe, Trainer)
    for name in ("accelerator", "is_deepspeed_enabled", "is_fsdp_enabled", "is_fsdp_xla_enabled"):
        probe.attribute(trainer, name)
    for name in ("global_step", "max_steps", "best_model_checkpoint", "save_to_json"):
        probe.attribute(trainer.state, name)
    for name in ("output_dir", "push_to_hub", "save_on_each_node", "save_only_model"):
        probe.attribute(trainer.args, name)
    for name in ("save_total_limit", "should_save"):
        probe.attribute(trainer.args, name)
    probe.check()
    _fitting.add(type(trainer))


def _probe_loop(probe: Probe, kind: type) -> None:
    """Probes the methods in which the mix-in loads, ends and waits."""
    loop = probe.attribute(kind, "_inner_training_loop")
    if hasattr(kind, "_finalize_training"):
        probe.calls(loop, "_prepare_for_training", "_run_epoch", "_finalize_training")
        begin = probe.attribute(kind, "_prepare_for_training")
        probe.calls(probe.attribute(kind, "_run_epoch"), "_load_rng_state")
        probe.calls(probe.attribute(kind, "_finalize_training"), "_load_best_model")
    else:
        # Before 5.3 one method contains all of it.
        begin = loop
        probe.calls(loop, "_load_rng_state", "get_batch_samples", "_load_best_model")
        probe.calls(loop, "_load_best_model", "_sorted_checkpoints")
    probe.calls(begin, "_load_optimizer_and_scheduler", "_load_scaler")


def best_step_of(state: Any) -> int | None:
    """The step of the best metric so far; None or 0 if there is none."""
    if hasattr(state, "best_global_step"):
        step: int | None = state.best_global_step
        return step
    # Transformers 4.49 records only the directory, before its checkpoint exists.
    found = _NAME.fullmatch(os.path.basename(state.best_model_checkpoint or ""))
    return None if found is None else int(found[1])


def warn_of_order() -> None:
    """Warns if the Trainer itself resumes with data in another order than the saved run.

    Before 5.3 it sets a loader's epoch and then lets Accelerate replace the loader, which from 1.7
    on begins with epoch 0 again; Accelerate 1.15 keeps the epoch.
    """
    found = {name: Version(version(name)).release for name in ("accelerate", "transformers")}
    if found["transformers"] < (5, 3) and (1, 7) <= found["accelerate"] < (1, 15):
        warnings.warn(
            f"transformers {version('transformers')} with accelerate {version('accelerate')} goes "
            "on in the middle of an epoch after the first with the order of the first epoch: "
            "pip install 'accelerate>=1.15'",
            PenstockWarning,
            stacklevel=3,
        )


def try_out(trainer: Trainer) -> None:
    """Saves and loads a tiny state as a trainer does, if transformers is newer than tested.

    All ranks call it. It works below the run's directory, and leaves nothing behind.
    """
    self_check("transformers", lambda: _try_out(trainer))


def _try_out(trainer: Trainer) -> None:
    with trial_directory(trainer.args.output_dir or ".") as directory:
        _save_and_load(_tiny(trainer, directory), directory)


def _tiny(trainer: Trainer, directory: str) -> Any:
    """A copy of the trainer with a model of two parameters; everything else is shared."""
    tiny: Any = copy.copy(trainer)
    tiny.model = tiny.model_wrapped = torch.nn.Linear(1, 1).to(trainer.args.device)
    tiny.optimizer = torch.optim.Adam(tiny.model.parameters())
    tiny.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        tiny.optimizer, lambda step: 1 / (1 + step)
    )
    tiny.model(torch.ones(1, 1, device=trainer.args.device)).sum().backward()
    tiny.optimizer.step()
    tiny.state = copy.deepcopy(trainer.state)
    tiny.state.global_step = 1
    tiny.state.best_model_checkpoint = None
    tiny.args = copy.copy(trainer.args)
    tiny.args.output_dir = directory
    tiny.args.push_to_hub = False
    tiny.args.save_only_model = False
    tiny.args.save_total_limit = None
    tiny.processing_class = tiny.data_collator = None
    tiny.penstock_saves = tiny._penstock_rng = None
    # A job that seals need not have identities to load with.
    tiny.penstock_settings = tiny.penstock_settings.clear()
    return tiny


def _save_and_load(tiny: Any, directory: str) -> None:
    tiny._save_checkpoint(tiny.model, None)
    tiny.penstock_saves.wait()
    path = os.path.join(directory, "checkpoint-1")
    saved = [one.detach().clone() for one in tiny.model.parameters()]
    moment = tiny.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    with torch.no_grad():
        for one in tiny.model.parameters():
            one.zero_()
    tiny.optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    tiny._load_from_checkpoint(path)
    tiny._load_optimizer_and_scheduler(path)
    tiny._load_scaler(path)
    tiny._load_rng_state(path)
    is_same = torch.equal(tiny.optimizer.state_dict()["state"][0]["exp_avg"], moment)
    pairs = zip(tiny.model.parameters(), saved, strict=True)
    if not is_same or not all(torch.equal(*pair) for pair in pairs):
        raise StateMismatchError(
            f"{path}: a model or an optimizer came back otherwise", key="model", path=path
        )
