"""`PacedCheckpoint`: a `ModelCheckpoint` that saves when a save is due."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import ModelCheckpoint

from penstock.errors import PenstockError
from penstock.integrations.lightning.checkpoint_io import PenstockIO
from penstock.plugin import PacedRun

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_TRIGGERS = ("every_n_train_steps", "every_n_epochs", "train_time_interval")


class PacedCheckpoint(ModelCheckpoint):
    """Saves after as many steps as lose least time to saves and failures.

    Use it in place of `ModelCheckpoint`, in a trainer that saves through `PenstockIO`. It measures
    saves and steps while the run goes on, as `penstock.CheckpointStore.due` does, and keeps their
    times in ``history.jsonl`` beside the checkpoints, for ``penstock plan``. When a save is
    due, all ranks take the first one's number of steps.

    Args:
        save_every: Steps between two saves, or ``"auto"``.
        failures_per_hour: Failures of the whole job, for ``"auto"``. None for those that the
            history counts, beginning with published rates of nodes.
        save_seconds_max: With ``"auto"``, the longest time between two saves.
        arguments: Further arguments of `ModelCheckpoint`, such as ``dirpath``.

    Raises:
        ValueError: An argument is out of range, or would make saves at other steps.

    Example:
        >>> import tempfile
        >>> from penstock.integrations.lightning import PacedCheckpoint
        >>> callback = PacedCheckpoint(dirpath=tempfile.mkdtemp(), save_every="auto")
    """

    def __init__(
        self,
        *,
        save_every: int | Literal["auto"] = "auto",
        failures_per_hour: float | None = None,
        save_seconds_max: float = 3600.0,
        **arguments: Any,
    ) -> None:
        given = [name for name in _TRIGGERS if arguments.get(name) is not None]
        if given:
            raise ValueError(f"{given[0]}: save_every says when to save; leave one of them out")
        if arguments.get("save_last") is True:
            raise ValueError("save_last=True saves everything twice: give save_last='link'")
        # Asked after each step, and answered by `due`.
        super().__init__(every_n_train_steps=1, **arguments)
        self._pace: dict[str, Any] = {
            "save_every": save_every,
            "failures_per_hour": failures_per_hour,
            "save_seconds_max": save_seconds_max,
        }
        PacedRun("", **self._pace)
        self._paced_run: PacedRun | None = None
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the run."""
        super().on_train_start(trainer, pl_module)
        io = self._io(trainer)
        self._paced_run = PacedRun(
            str(self.dirpath),
            agree=lambda find: trainer.strategy.broadcast(find()),
            **self._pace,
        )
        self._step = trainer.global_step
        if self._step:
            self._paced_run.resumed(self._step)
            if io.load_seconds is not None:
                self._paced_run.restored(self._step, io.load_seconds)
        io.record(self._paced_run)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Saves if a save is due."""
        run = self._paced_run
        # Several batches may be one step.
        if run is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if run.due(self._step, is_saving=self._io(trainer).is_saving):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the run, once its last save is durable."""
        super().on_train_end(trainer, pl_module)
        try:
            self._io(trainer).wait()
        finally:
            self._end(trainer, None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends the run by an error, which counts as a failure."""
        super().on_exception(trainer, pl_module, exception)
        # A save that ends later would begin another run. The error of the training comes first.
        with contextlib.suppress(PenstockError):
            self._io(trainer).wait()
        self._end(trainer, exception)

    def _end(self, trainer: Trainer, error: BaseException | None) -> None:
        run, self._paced_run = self._paced_run, None
        if run is not None:
            self._io(trainer).record(None)
            run.close(error)

    def _io(self, trainer: Trainer) -> PenstockIO:
        io: Any = trainer.strategy.checkpoint_io
        if not isinstance(io, PenstockIO):
            raise PenstockError(
                "PacedCheckpoint measures the saves of Penstock: pass plugins=[PenstockIO()] to "
                "the trainer"
            )
        return io
