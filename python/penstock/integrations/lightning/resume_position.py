"""Restores a run's random states and its position in the data.

Lightning saves no random states. It saves the states of loaders that know their position, but drops
them at the end of an epoch, so that the next epoch has the order of the first. Of actions that
follow a save it omits those of the same batch or epoch: a validation, the hooks at the end of the
epoch, a step of `ReduceLROnPlateau`.

A resumed run continues exactly at the save. Random states are restored only there, as Lightning may
draw random numbers on the way:

- In the middle of an epoch the iterators were made before the save, so random states are restored
  after they are made again.
- At the last batch the rest of the epoch comes first. Then loaders are moved to the end of the old
  epoch, and Lightning begins the next one. It also asks loaders for an iterator when a run begins,
  which an epoch without batches does not use: a stream would lose the batch fetched ahead. So
  Lightning gets an empty iterator there.
- After the end of an epoch only the end of the loop is left.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng

from penstock import Training
from penstock.errors import PenstockWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lightning.pytorch as pl

KEY = "penstock"
"""Key in a checkpoint for the state that Lightning does not save."""


def capture(trainer: pl.Trainer, *, is_together: bool) -> dict[str, Any]:
    """Captures each rank's state that Lightning does not save; called by all ranks.

    ``is_together``: every rank saves its own part; otherwise one rank saves for all.
    """
    loader = trainer.fit_loop._combined_loader
    if loader is not None and trainer.is_global_zero:
        _check_loaders(loader.flattened, trainer.fit_loop.epoch_loop.batch_progress)
    metrics = trainer.callback_metrics
    own = {
        "rng": Training().state_dict()["rng"],
        "loaders": [] if loader is None else loader._state_dicts(),
        # Values that schedulers and callbacks monitor.
        "metrics": {name: value.item() for name, value in metrics.items()},
        "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
        # After `fit` loaders have no iterator, and begin an epoch when asked for one.
        "has_begun": trainer.fit_loop._data_fetcher is not None,
    }
    states: list[Any] = [own]
    size = dist.get_world_size() if dist.is_initialized() else 1
    if not is_together and is_alone(trainer):
        # The other ranks are elsewhere, and would not answer.
        return {"ranks": 1, "states": states}
    if size > 1 and not is_together:
        states = [None] * size
        dist.all_gather_object(states, own)
    return {"ranks": size, "states": states}


def _check_loaders(loaders: list[Any], batches: Any) -> None:
    """Warns of loaders whose position cannot be restored where they are."""
    is_within = batches.current.ready > 0 and not batches.is_last_batch
    for loader in loaders:
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if not isinstance(loader, _Stateful):
            if not is_within:
                continue
            what = f"a {type(loader).__name__} does not know its place in an epoch"
            remedy = "use torchdata's StatefulDataLoader, or save at the end of epochs"
        elif isinstance(sampler, DistributedSamplerWrapper):
            what = "the sampler that Lightning has put into a loader does not know its place"
            remedy = "give the loader sampler=StatefulDistributedSampler(…), of torchdata"
        else:
            continue
        warnings.warn(
            f"a run that goes on from the checkpoint will see other data than this one: {what}; "
            f"{remedy}",
            PenstockWarning,
            stacklevel=1,
        )


def is_alone(trainer: Any) -> bool:
    """Whether this rank saves while others may be anywhere.

    It does so in a signal handler, and when it ends with an exception that others may not have. All
    ranks get the exception of a SIGTERM, after the same step.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    is_ending = trainer.interrupted and not isinstance(sys.exception(), SIGTERMException)
    return is_ending or trainer._signal_connector.is_alone


class ResumePosition:
    """Moves a run to the position at which another one was saved."""

    def __init__(self, checkpoint: dict[str, Any], path: str) -> None:
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        progress = loops.get("epoch_loop.batch_progress", {})
        self._is_at_last_batch = bool(progress.get("is_last_batch"))
        own = _own(checkpoint.get(KEY), path)
        self._path = path
        # With another number of ranks only the first rank's loader state can fit.
        self._loaders = own.get("loaders", loops.get("state_dict", {}).get("combined_loader", []))
        self._random = own.get("rng")
        self._metrics = own.get("metrics")
        self._reloaded_epoch = own.get("reloaded")
        self._has_begun = own.get("has_begun", True)
        self._positioned: list[Any] | None = None

    def install(self, trainer: pl.Trainer) -> None:
        """Makes the loops of a trainer, whose state is loaded, begin at this position."""
        fit_loop: Any = trainer.fit_loop
        epoch = fit_loop.epoch_progress.current
        batch = fit_loop.epoch_loop.batch_progress.current
        is_over = epoch.ready == epoch.started == epoch.processed
        is_between = self._is_at_last_batch and is_over
        # A save after `fit` also follows this step.
        has_plateau_step = is_between and epoch.completed < epoch.processed
        if is_between:
            # If max_steps ends a run, Lightning would enter this epoch again, for one batch.
            vars(_Loop)["restarting"].fset(fit_loop, False)
        is_at_batch_end = not is_over and batch.ready == batch.processed == batch.completed + 1
        if not is_over and batch.ready > batch.completed and not is_at_batch_end:
            warnings.warn(
                f"{self._path} was saved in the middle of a batch, by a signal or an exception: "
                "this run goes on with the batch after it",
                PenstockWarning,
                stacklevel=1,
            )
        if is_at_batch_end:
            # Lightning would omit a validation that is due, and the end of the epoch.
            fit_loop.epoch_loop.batch_progress.increment_completed()
        self._set_up_data(trainer, has_plateau_step=has_plateau_step)
        self._begin_epochs(trainer, is_between=is_between, is_at_batch_end=is_at_batch_end)

    @staticmethod
    def uninstall(trainer: pl.Trainer) -> None:
        """Restores Lightning's own methods of the loops."""
        fit_loop: Any = trainer.fit_loop
        for name in ("_load_combined_loader_states", "on_advance_start", "setup_data"):
            vars(fit_loop).pop(name, None)
        for name in ("on_run_start", "advance"):
            vars(fit_loop.epoch_loop).pop(name, None)

    @staticmethod
    def _finish_batch(epoch_loop: Any) -> None:
        """Skips a batch's training, so that the loop continues after `on_train_batch_end`."""

        def advance(data_fetcher: Any) -> None:
            del epoch_loop.advance
            epoch_loop.val_loop.restarting = False

        # Set by an earlier `fit`; the loop would end at once.
        epoch_loop.val_loop._has_run = False
        epoch_loop.advance = advance

    def _set_up_data(self, trainer: pl.Trainer, *, has_plateau_step: bool) -> None:
        fit_loop: Any = trainer.fit_loop
        set_up = fit_loop.setup_data
        waiting: list[Any] = []

        def setup_data() -> None:
            set_up()
            if waiting:
                fit_loop._combined_loader.flattened = waiting[:]
                waiting.clear()

        def load_combined_loader_states() -> None:
            is_first = self._positioned is None
            if is_first:
                # The loop's first action.
                self._restore_metrics(trainer)
                if has_plateau_step and self._metrics is not None:
                    fit_loop.epoch_loop.update_lr_schedulers(
                        "epoch", update_plateau_schedulers=True
                    )
            fit_loop._combined_loader_states_to_load = []
            if is_first and self._is_at_last_batch:
                combined = fit_loop._combined_loader
                waiting[:] = self._positioned = list(combined.flattened)
                combined.flattened = [_Waiting(loader) for loader in waiting]
            else:
                self._position(fit_loop)

        fit_loop.setup_data = setup_data
        fit_loop._load_combined_loader_states = load_combined_loader_states

    def _begin_epochs(
        self, trainer: pl.Trainer, *, is_between: bool, is_at_batch_end: bool
    ) -> None:
        fit_loop: Any = trainer.fit_loop
        epoch_loop: Any = fit_loop.epoch_loop
        begin_advance, begin_epoch = fit_loop.on_advance_start, epoch_loop.on_run_start
        is_finishing = self._is_at_last_batch and not is_between

        def on_advance_start() -> None:
            if is_between:
                self._restore_random()
            if self._reloaded_epoch is not None:
                fit_loop._last_train_dl_reload_epoch = self._reloaded_epoch
                self._reloaded_epoch = None
            loader = fit_loop._combined_loader
            begin_advance()
            if fit_loop._combined_loader is not loader:
                # Made again for this epoch, and already at its position.
                self._loaders, self._positioned = [], []

        def on_run_start(data_fetcher: Any) -> None:
            nonlocal is_finishing
            is_new_epoch = self._is_at_last_batch and not is_finishing
            if is_new_epoch:
                self._position(fit_loop)
            # A fetcher iterates over the loaders themselves, which make another iterator each time.
            iterator = data_fetcher.combined_loader._iterator
            begin_epoch(data_fetcher)
            if is_new_epoch and data_fetcher.combined_loader._iterator is iterator:
                # When resumed, Lightning would reuse the iterator of `setup_data`.
                iter(data_fetcher)
            if not is_finishing:
                self.uninstall(trainer)
            if is_new_epoch:
                return
            self._restore_random()
            if is_finishing:
                is_finishing = False
                # Otherwise a step of `ReduceLROnPlateau` would be omitted.
                fit_loop._restarting = False
            if is_at_batch_end:
                self._finish_batch(epoch_loop)

        fit_loop.on_advance_start = on_advance_start
        epoch_loop.on_run_start = on_run_start

    def _position(self, fit_loop: Any) -> None:
        """Makes the next iterators of the loaders begin at their saved position."""
        combined = fit_loop._combined_loader
        if combined is None:
            return
        loaders = combined.flattened
        if self._positioned is None:
            self._positioned = list(loaders)
        if [id(one) for one in loaders] != [id(one) for one in self._positioned]:
            # This epoch has loaders of its own.
            return
        with isolate_rng():
            if self._loaders:
                combined._load_state_dicts(self._loaders)
            for loader in loaders:
                is_kept = getattr(loader, "persistent_workers", False)
                is_at_end = self._loaders and self._has_begun and isinstance(loader, _Stateful)
                if self._is_at_last_batch and (is_kept or is_at_end):
                    # It is at its end now, and the next iterator begins an epoch. Samplers that are
                    # generators take their position when they are first asked.
                    next(iter(loader), None)
                # Lightning sets the samplers' epoch after the first batches were requested.
                _set_sampler_epoch(loader, fit_loop.epoch_progress.current.processed)

    def _restore_metrics(self, trainer: pl.Trainer) -> None:
        device = trainer.strategy.root_device
        metrics = {
            name: torch.tensor(value, device=device)
            for name, value in (self._metrics or {}).items()
        }
        trainer._logger_connector._callback_metrics.update(metrics)

    def _restore_random(self) -> None:
        if self._random is not None:
            Training().load_state_dict({"rng": self._random})


class _Waiting:
    """A loader whose epoch has not begun: it has its length, but no batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _own(saved: dict[str, Any] | None, path: str) -> dict[str, Any]:
    """The saved state of this rank."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if saved is None:
        _warn_once(
            rank,
            f"{path} holds no random states, which Lightning does not save: this run draws other "
            "numbers than the one that saved it would have drawn",
        )
        return {}
    states = saved["states"]
    own: dict[str, Any] = states[rank % len(states)]
    if saved["ranks"] == size:
        return own
    _warn_once(
        rank,
        f"{path} holds the random states of {saved['ranks']} ranks, and there are {size}: they "
        "draw other numbers than those would have drawn",
    )
    return {"rng": own["rng"]}


def _warn_once(rank: int, message: str) -> None:
    """Warns of something that all ranks see, on the first rank only."""
    if rank == 0:
        warnings.warn(message, PenstockWarning, stacklevel=1)
