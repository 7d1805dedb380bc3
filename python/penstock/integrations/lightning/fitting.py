"""Checks that the plug-in fits the installed Lightning.

The plug-in replaces mostly private names. All of them are looked up before any is replaced, so that
an error lists all that have changed.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError
from penstock.integrations.versions import Probe, self_check

if TYPE_CHECKING:
    from collections.abc import Callable

_PYTORCH = "lightning.pytorch"

_NAMES = {
    "lightning.fabric.utilities.cloud_io": ("_load",),
    "lightning.fabric.utilities.data": ("_set_sampler_epoch",),
    "lightning.fabric.utilities.distributed": ("DistributedSamplerWrapper",),
    "lightning.fabric.utilities.types": ("_Stateful",),
    "lightning.fabric.plugins.io.torch_io": ("TorchCheckpointIO",),
    "lightning.fabric.plugins.environments.slurm": ("SLURMEnvironment",),
    f"{_PYTORCH}.loggers.mlflow": ("_scan_checkpoints",),
    f"{_PYTORCH}.loggers.utilities": ("_scan_checkpoints",),
    f"{_PYTORCH}.trainer.states": ("TrainerFn",),
    f"{_PYTORCH}.trainer.trainer": ("_CheckpointConnector", "_SignalConnector"),
    f"{_PYTORCH}.utilities.exceptions": ("SIGTERMException",),
    f"{_PYTORCH}.utilities.seed": ("isolate_rng",),
}
"""Names that the plug-in imports or replaces, by module."""

_trying_out = False


def check() -> None:
    """Raises `MissingDependencyError`, with a list, if Lightning lacks parts the plug-in uses."""
    probe = Probe("lightning", "penstock.integrations.lightning")
    for module, names in _NAMES.items():
        for name in names:
            probe.attribute(module, name)
    load = probe.attribute(f"{_PYTORCH}.core.saving", "_load_from_checkpoint")
    probe.calls(load, "pl_load")
    trainer = probe.attribute(_PYTORCH, "Trainer")
    probe.calls(
        probe.attribute(trainer, "_run"), "_restore_modules_and_callbacks", "restore_training_state"
    )
    _probe_connectors(probe)
    _probe_loops(probe)
    callback = probe.attribute(f"{_PYTORCH}.callbacks", "ModelCheckpoint")
    link = probe.attribute(callback, "_link_checkpoint")
    probe.signature(link, "trainer", "filepath", "linkpath")
    probe.attribute(callback, "_find_last_checkpoints")
    probe.attribute(callback, "_ModelCheckpoint__resolve_ckpt_dir")
    logger = probe.attribute(f"{_PYTORCH}.loggers", "WandbLogger")
    upload = probe.attribute(logger, "_scan_and_log_checkpoints")
    probe.signature(upload, "checkpoint_callback")
    probe.calls(upload, "_scan_checkpoints", "log_artifact")
    probe.check()


def _probe_connectors(probe: Probe) -> None:
    """Probes the methods that `Connector` and `SignalConnector` override."""
    kind = probe.attribute(
        f"{_PYTORCH}.trainer.connectors.checkpoint_connector", "_CheckpointConnector"
    )
    parse = probe.attribute(kind, "_parse_ckpt_path")
    probe.signature(parse, "state_fn", "ckpt_path", "model_provided", "model_connected")
    resume = probe.attribute(kind, "resume_start")
    probe.signature(resume, "checkpoint_path")
    probe.calls(resume, "load_checkpoint")
    probe.signature(probe.attribute(kind, "dump_checkpoint"), "weights_only")
    probe.attribute(kind, "_hpc_resume_path")
    training = probe.attribute(kind, "restore_training_state")
    probe.calls(training, "restore_optimizers_and_schedulers")
    probe.calls(training, "restore_loops")
    probe.signature(probe.attribute(kind, "restore_loops"))
    probe.signature(probe.attribute(kind, "restore_optimizers_and_schedulers"))
    signals = probe.attribute(f"{_PYTORCH}.trainer.connectors.signal_connector", "_SignalConnector")
    for name in ("register_signal_handlers", "teardown", "_slurm_sigusr_handler_fn"):
        probe.attribute(signals, name)


def _probe_loops(probe: Probe) -> None:
    """Probes the methods in which a resumed run's position is restored."""
    fit = probe.attribute(f"{_PYTORCH}.loops.fit_loop", "_FitLoop")
    data = probe.attribute(fit, "setup_data")
    probe.calls(data, "_load_combined_loader_states", "_select_data_fetcher", "iter")
    probe.calls(probe.attribute(fit, "on_advance_start"), "setup_data", "_set_sampler_epoch")
    epoch = probe.attribute(f"{_PYTORCH}.loops.training_epoch_loop", "_TrainingEpochLoop")
    probe.signature(probe.attribute(epoch, "on_run_start"), "data_fetcher")
    probe.signature(probe.attribute(epoch, "advance"), "data_fetcher")
    probe.calls(probe.attribute(epoch, "run"), "on_run_start", "advance")
    schedulers = probe.attribute(epoch, "update_lr_schedulers")
    probe.signature(schedulers, "interval", "update_plateau_schedulers")
    probe.attribute(epoch, "_should_accumulate")
    probe.attribute(probe.attribute(f"{_PYTORCH}.loops.loop", "_Loop"), "restarting")
    loaders = probe.attribute(f"{_PYTORCH}.utilities.combined_loader", "CombinedLoader")
    for name in ("_state_dicts", "_load_state_dicts", "flattened"):
        probe.attribute(loaders, name)
    # Only instances have it; the length of a loader uses it.
    probe.calls(probe.attribute(loaders, "__len__"), "_iterator")


def try_out(make: Callable[[], Any]) -> None:
    """Runs two steps and resumes from them, if Lightning is newer than the versions tested."""
    global _trying_out
    if _trying_out:
        return
    _trying_out = True
    try:
        self_check("lightning", lambda: _try_out(make))
    finally:
        _trying_out = False


def _try_out(make: Callable[[], Any]) -> None:
    from penstock import Training

    generators = Training()
    before = generators.state_dict()
    log = logging.getLogger(_PYTORCH)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-trial-") as directory:
            _save_and_resume(directory, make)
    finally:
        log.setLevel(level)
        generators.load_state_dict(before)


def _save_and_resume(directory: str, make: Callable[[], Any]) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Tiny(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([torch.ones(1), torch.ones(1)])  # type: ignore[arg-type]

    def trained(path: str | None, epochs: int) -> Any:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            plugins=[make()],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=directory,
        )
        torch.manual_seed(0)
        module = Tiny()
        trainer.fit(module, ckpt_path=path)
        trainer.save_checkpoint(os.path.join(directory, f"{epochs}.ckpt"))
        return trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(None, 1)
        resumed = trained(os.path.join(directory, "1.ckpt"), 2)
        straight = trained(None, 2)
    pairs = zip(resumed.model.parameters(), straight.model.parameters(), strict=True)
    if resumed.global_step != straight.global_step or not all(torch.equal(*one) for one in pairs):
        raise StateMismatchError("a run that went on ended otherwise than one that did not stop")
