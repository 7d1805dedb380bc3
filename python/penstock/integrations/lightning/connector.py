"""`Connector`: chooses, loads and assembles checkpoints in Lightning's Trainer.

A `CheckpointIO` gets a path and a dictionary. It does not decide which path ``"last"`` is, and sees
only the first rank. For trainers that save through `PenstockIO` this connector does; for all others
it works as Lightning's own.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from penstock.errors import (
    CorruptCheckpointError,
    PenstockError,
    PenstockWarning,
    StateMismatchError,
    TamperedError,
)
from penstock.integrations.lightning import loading, newest, resume_position
from penstock.integrations.lightning.checkpoint_io import PenstockIO
from penstock.integrations.lightning.strategies import ShardedCheckpoints
from penstock.plugin import SealingKeys, check_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.fabric.utilities.types import _PATH

_SHARDED = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
"""Strategies that save or load without the plug-in."""


def io_of(trainer: Any) -> PenstockIO | None:
    """The plug-in that a trainer saves through, if it is a `PenstockIO`; else None."""
    found = trainer.strategy.checkpoint_io
    return found if isinstance(found, PenstockIO) else None


class Connector(_CheckpointConnector):
    """Lightning's connector, extended for `PenstockIO`."""

    _position: resume_position.ResumePosition | None = None
    _given_schedulers: Sequence[Any] = ()
    """Schedulers made by `configure_optimizers`."""
    _others: tuple[str, ...] = ()
    """Older checkpoints to load if the chosen one proves to be damaged."""

    def _parse_ckpt_path(
        self, state_fn: TrainerFn, ckpt_path: Any, model_provided: bool, model_connected: bool
    ) -> Any:
        self._others = ()
        is_ours = io_of(self.trainer) is not None
        if is_ours and (ckpt_path == "last" or (ckpt_path is None and self._resumes_by_itself())):
            ckpt_path = self._newest()
            if ckpt_path is None:
                warnings.warn(
                    f'.{state_fn.value}(ckpt_path="last"): there is no complete checkpoint yet, '
                    "a new run begins",
                    PenstockWarning,
                    stacklevel=1,
                )
                return None
        return super()._parse_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)

    def _resumes_by_itself(self) -> bool:
        """Whether Lightning resumes from the last checkpoint without being asked."""
        trainer: Any = self.trainer
        return (
            trainer.state.fn == TrainerFn.FITTING
            and any(isinstance(one, OnExceptionCheckpoint) for one in trainer.callbacks)
            and not (SLURMEnvironment.detect() and self._hpc_resume_path is not None)
        )

    def _newest(self) -> str | None:
        trainer: Any = self.trainer
        candidates: set[str] = set()
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint):
                # A private method of that class, hence the mangled name.
                private: Any = callback
                directory = private._ModelCheckpoint__resolve_ckpt_dir(trainer)
                candidates |= callback._find_last_checkpoints(trainer)
                candidates |= set(newest.beside(str(directory)))
            elif isinstance(callback, OnExceptionCheckpoint) and os.path.exists(callback.ckpt_path):
                candidates.add(callback.ckpt_path)
        found = newest.newest(candidates, self._keys())
        self._others = tuple(found[1:])
        return found[0] if found else None

    @property
    def _hpc_resume_path(self) -> str | None:
        if io_of(self.trainer) is None:
            return super()._hpc_resume_path
        return newest.of_slurm(str(self.trainer.default_root_dir), self._keys())

    def _keys(self) -> SealingKeys:
        """The keys of the trainer's plug-in."""
        io = io_of(self.trainer)
        return SealingKeys() if io is None else io.keys

    def resume_start(
        self, checkpoint_path: _PATH | None = None, weights_only: bool | None = None
    ) -> None:
        """Loads a checkpoint; if one chosen here is damaged, but not tampered with, an older one."""
        self._position = None
        resume_position.ResumePosition.uninstall(self.trainer)
        io = io_of(self.trainer)
        if io is None:
            super().resume_start(checkpoint_path, **loading.weights_only_of(weights_only))
            return
        self._check_strategy()
        io.is_running = True
        strategy = self.trainer.strategy
        # Every rank has chosen; the first one's choice counts.
        first, others = strategy.broadcast((checkpoint_path, self._others))
        paths = (first, *others)
        for path in paths:
            error = self._load(path, weights_only)
            # Without a process group the reduction would not count this rank alone as all.
            is_alone = not dist.is_available() or not dist.is_initialized()
            is_good = error is None
            if is_good if is_alone else strategy.reduce_boolean_decision(is_good):
                break
            is_tampered = isinstance(error, TamperedError)
            if not is_alone:
                is_tampered = strategy.reduce_boolean_decision(is_tampered, all=False)
            told = f"{path} is damaged, as another rank has found"
            error = error or CorruptCheckpointError(told, path=str(path))
            if is_tampered:
                # Whoever changed it would choose the checkpoint of the run.
                raise error
            if path is paths[-1]:
                raise error
            warnings.warn(f"a checkpoint is passed over: {error}", PenstockWarning, stacklevel=1)
        if self._loaded_checkpoint and self.trainer.state.fn == TrainerFn.FITTING:
            self._position = resume_position.ResumePosition(self._loaded_checkpoint, str(path))

    def _load(self, path: Any, weights_only: bool | None) -> CorruptCheckpointError | None:
        try:
            super().resume_start(path, **loading.weights_only_of(weights_only))
        except CorruptCheckpointError as error:
            return error
        return None

    def _check_strategy(self) -> None:
        """Raises for a strategy that would silently save without the plug-in."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, _SHARDED) or isinstance(strategy, ShardedCheckpoints):
            return
        if isinstance(strategy, ModelParallelStrategy):
            remedy = "pass strategy=PenstockModelParallelStrategy(…) instead"
        elif isinstance(strategy, FSDPStrategy):
            remedy = (
                "shard with fully_shard and PenstockModelParallelStrategy(…), or leave PenstockIO "
                "out and call penstock.integrations.dcp.enable()"
            )
        else:
            remedy = "leave PenstockIO out, and give DeepSpeed the engine of Penstock"
        name = type(strategy).__name__
        raise PenstockError(f"{name} does not save and load through PenstockIO: {remedy}")

    def restore_model(self) -> None:
        """Restores the model, whose tied weights must be equal in the checkpoint."""
        super().restore_model()
        state = self._loaded_checkpoint.get("state_dict") if self._loaded_checkpoint else None
        if state and io_of(self.trainer) is not None:
            # Checked afterwards, as hooks of the module may change the state first.
            check_model(self.trainer.lightning_module, state, str(self._ckpt_path))

    def restore_loops(self) -> None:
        """Restores the loops, and the positions and random states at their saved place."""
        super().restore_loops()
        if self._position is not None:
            self._position.install(self.trainer)

    def restore_optimizers_and_schedulers(self) -> None:
        """Restores them, if there are as many as were saved; Lightning would take any number."""
        trainer: Any = self.trainer
        given = {
            "optimizer_states": ("optimizers", trainer.optimizers),
            "lr_schedulers": ("schedulers", trainer.lr_scheduler_configs),
        }
        for key, (name, mine) in given.items() if io_of(trainer) is not None else ():
            saved = self._loaded_checkpoint.get(key)
            added = self._added_by_callbacks() if key == "lr_schedulers" else 0
            if saved is not None and len(mine) not in (len(saved), len(saved) - added):
                raise StateMismatchError(
                    f"{self._ckpt_path} holds the states of {len(saved)} {name}, and "
                    f"configure_optimizers has made {len(mine)}: make those of the run that "
                    "saved it",
                    key=key,
                    path=str(self._ckpt_path),
                )
        super().restore_optimizers_and_schedulers()

    def _added_by_callbacks(self) -> int:
        """The number of saved schedulers that `configure_optimizers` has not made.

        A callback that replaces or adds schedulers makes and restores these itself.
        """
        trainer: Any = self.trainer
        own = self._loaded_checkpoint.get(resume_position.KEY) or {}
        if "added_schedulers" in own:
            return int(own["added_schedulers"])
        # Saved by Lightning, or by a Penstock that did not count them.
        averages = [one for one in trainer.callbacks if isinstance(one, StochasticWeightAveraging)]
        return int(any(one._scheduler_state is not None for one in averages))

    def restore_training_state(self) -> None:
        """Restores everything but the model; called by every run, also by a new one."""
        super().restore_training_state()
        # Callbacks add schedulers later, once training has begun.
        self._given_schedulers = list(self.trainer.lr_scheduler_configs)
        io = io_of(self.trainer)
        if io is not None and self._saves_what_it_has():
            io.check(self._known())

    def _saves_what_it_has(self) -> bool:
        """Whether this run will save checkpoints, and no hook can remove values from them."""
        trainer: Any = self.trainer
        owners: list[tuple[type, Any]] = [(LightningModule, trainer.lightning_module)]
        owners += [(Callback, one) for one in trainer.callbacks]
        if trainer.datamodule is not None:
            owners.append((LightningDataModule, trainer.datamodule))
        hook = "on_save_checkpoint"
        # Data modules of some versions lack the hook.
        has_hooks = any(
            getattr(type(one), hook, None) is not getattr(kind, hook, None) for kind, one in owners
        )
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        return is_fitting and bool(trainer.checkpoint_callbacks) and not has_hooks

    def _known(self) -> dict[str, Any]:
        """The parts of a checkpoint that exist before training and need no hook."""
        trainer: Any = self.trainer
        known: dict[str, Any] = {
            "callbacks": {},
            "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        }
        if not isinstance(trainer.strategy, _SHARDED):
            known["optimizer_states"] = [one.state_dict() for one in trainer.optimizers]
        for owner in (trainer.lightning_module, trainer.datamodule):
            if owner is not None and getattr(owner, "_hparams_name", None):
                hparams = owner.hparams
                known[owner.CHECKPOINT_HYPER_PARAMS_KEY] = (
                    dict(hparams) if isinstance(hparams, dict) else hparams
                )
        _leave_functions_out(known)
        return known

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Assembles a checkpoint, and adds what Lightning leaves out."""
        own = None
        if io_of(self.trainer) is not None and not weights_only:
            is_together = isinstance(self.trainer.strategy, ShardedCheckpoints)
            # First: asking loaders and hooks for their state may draw random numbers.
            own = resume_position.capture(self.trainer, is_together=is_together)
            given = [id(one) for one in self._given_schedulers]
            added = [one for one in self.trainer.lr_scheduler_configs if id(one) not in given]
            own["added_schedulers"] = len(added)
        checkpoint = super().dump_checkpoint(weights_only)
        if own is None:
            return checkpoint
        _leave_functions_out(checkpoint)
        return checkpoint | {resume_position.KEY: own}


def _leave_functions_out(checkpoint: dict[str, Any]) -> None:
    """Removes a function that older versions of PyTorch put into the state of `SWALR`.

    It follows from the argument ``anneal_strategy``, which a new scheduler gets anyway.
    """
    callbacks = [one for one in checkpoint["callbacks"].values() if isinstance(one, dict)]
    states = [*checkpoint["lr_schedulers"], *(one.get("scheduler_state") for one in callbacks)]
    for state in states:
        if isinstance(state, dict) and callable(state.get("anneal_func")):
            del state["anneal_func"]
