"""Where a run goes on: random states of every rank, and the place in the data.

Lightning saves no random states. It saves the states of loaders that know their place, and forgets
them where an epoch has just ended, so that the next one has the order of the first.

Both have to be right when the first batch is drawn. In the middle of an epoch the iterators were
made before the save, so random states are restored after they are made anew. At its end they are
made after it: loaders are brought to the end of the old epoch, random states are restored, and then
Lightning begins the next one.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.loops.loop import _Loop

from penstock import Training
from penstock.errors import PenstockWarning

if TYPE_CHECKING:
    import lightning.pytorch as pl

KEY = "penstock"
"""What a checkpoint calls what Lightning does not save."""


def capture(trainer: pl.Trainer, *, is_together: bool) -> dict[str, Any]:
    """What Lightning does not save, of each rank; called by all of them.

    Args:
        trainer: Who saves.
        is_together: Whether every rank saves its own part, or one for all.
    """
    loader = trainer.fit_loop._combined_loader
    own = {
        "rng": Training().state_dict()["rng"],
        "loaders": [] if loader is None else loader._state_dicts(),
    }
    states: list[Any] = [own]
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1 and not is_together:
        states = [None] * size
        dist.all_gather_object(states, own)
    return {"ranks": size, "states": states}


class Place:
    """What brings one run to where another one was saved.

    Args:
        checkpoint: What was loaded.
        path: From where.
    """

    def __init__(self, checkpoint: dict[str, Any], path: str) -> None:
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        progress = loops.get("epoch_loop.batch_progress", {})
        self._is_between_epochs = bool(progress.get("is_last_batch"))
        own = _own(checkpoint.get(KEY), path)
        # Of another number of ranks only what the first one had can be anybody's.
        self._loaders = own.get("loaders", loops.get("state_dict", {}).get("combined_loader", []))
        self._random = own.get("rng")

    def install(self, trainer: pl.Trainer) -> None:
        """Has the loops of a trainer, whose state is loaded, begin at this place."""
        fit_loop: Any = trainer.fit_loop
        epoch_loop: Any = fit_loop.epoch_loop
        begin_epoch = epoch_loop.on_run_start

        def position() -> None:
            self._position(fit_loop)
            fit_loop._combined_loader_states_to_load = []
            self._restore()

        def on_run_start(data_fetcher: Any) -> None:
            # What Lightning asks itself there.
            is_new = trainer.current_epoch > 0 and not fit_loop.is_resuming
            if self._is_between_epochs and is_new and not epoch_loop.restarting:
                position()
            begin_epoch(data_fetcher)
            if not self._is_between_epochs:
                self._restore()
            if not epoch_loop.done:
                self.uninstall(trainer)

        epoch = fit_loop.epoch_progress.current
        if self._is_between_epochs and epoch.ready == epoch.started == epoch.processed:
            # Where max_steps bounds a run Lightning takes this epoch up again, for one batch.
            vars(_Loop)["restarting"].fset(fit_loop, False)
        fit_loop._load_combined_loader_states = position
        epoch_loop.on_run_start = on_run_start

    @staticmethod
    def uninstall(trainer: pl.Trainer) -> None:
        """Leaves the loops as Lightning made them."""
        fit_loop: Any = trainer.fit_loop
        fit_loop.__dict__.pop("_load_combined_loader_states", None)
        fit_loop.epoch_loop.__dict__.pop("on_run_start", None)

    def _position(self, fit_loop: Any) -> None:
        """Has loaders go on at their place with what iterates over them next."""
        combined = fit_loop._combined_loader
        if combined is None:
            return
        if self._loaders:
            combined._load_state_dicts(self._loaders)
        for loader in combined.flattened:
            if self._loaders and self._is_between_epochs:
                # It is at its end now. What iterates over it next begins an epoch.
                iter(loader)
            # Lightning tells samplers after they were asked for the first batches.
            progress = fit_loop.epoch_progress.current
            _set_sampler_epoch(
                loader, progress.started if self._is_between_epochs else progress.processed
            )

    def _restore(self) -> None:
        if self._random is not None:
            Training().load_state_dict({"rng": self._random})


def _own(saved: dict[str, Any] | None, path: str) -> dict[str, Any]:
    """What was saved of this rank."""
    if saved is None:
        warnings.warn(
            f"{path} holds no random states, which Lightning does not save: this run draws other "
            "numbers than the one that saved it would have drawn",
            PenstockWarning,
            stacklevel=1,
        )
        return {}
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    states = saved["states"]
    own: dict[str, Any] = states[rank % len(states)]
    if saved["ranks"] == size:
        return own
    warnings.warn(
        f"{path} holds the random states of {saved['ranks']} ranks, and there are {size}: they "
        "draw other numbers than those would have drawn",
        PenstockWarning,
        stacklevel=1,
    )
    return {"rng": own["rng"]}
