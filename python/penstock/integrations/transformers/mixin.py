"""`PenstockTrainerMixin`: a Trainer whose checkpoints are Penstock's.

The Trainer's own `_save_checkpoint` runs, and with it that of a derived class, but puts the
checkpoint together in a directory beside (`_get_output_dir`), and of weights, optimizer, scheduler
and random states it writes nothing. What it writes is small, and carried in the checkpoint.

On resume the weights come together with all else, once optimizer and scheduler are there: all of
it is read and compared before anything changes.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import penstock
from penstock.checkpoint.loading.foreign import is_checkpoint
from penstock.errors import IncompleteCheckpointError, StateMismatchError, UnsupportedStateError
from penstock.integrations.first_rank import from_first
from penstock.integrations.transformers import fitting, parts, run, uploads
from penstock.integrations.transformers.saves import Retained, Saves, files_in
from penstock.integrations.transformers.settings import Settings
from penstock.integrations.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Trainer as _Base
else:
    _Base = object

check_version("transformers", "4.49", "5.24")


class PenstockTrainerMixin(_Base):
    """Has a trainer save and load its checkpoints with Penstock; stands before the trainer's class.

    ``class MyTrainer(PenstockTrainerMixin, Trainer)``. Where there is a trainer already, `enable`
    does the same to it.

    Attributes:
        penstock_settings: How it saves; set it in the class or for one trainer, before it trains.
    """

    penstock_settings: Settings = Settings()
    _penstock_saves: Saves | None = None
    _penstock_rng: tuple[int, dict[str, Any]] | None = None
    _penstock_is_looked_at = False

    def check_penstock(self) -> None:
        """Refuses a version that does not fit, and trainers that save in a way of their own.

        Raises:
            MissingDependencyError: This version of the Trainer works otherwise; it says where.
            UnsupportedStateError: DeepSpeed or XLA saves the model.
            ValueError: An argument of the training does not go together with Penstock.
        """
        fitting.check_trainer(self)
        if self.is_deepspeed_enabled:
            raise UnsupportedStateError(
                "a model that DeepSpeed trains is saved by its engine: leave the trainer as it is",
                key="model",
            )
        if self.is_fsdp_xla_enabled:
            raise UnsupportedStateError(
                "a model that XLA has sharded is saved by the Trainer only: leave it as it is",
                key="model",
            )
        if self.args.save_on_each_node:
            raise ValueError(
                "save_on_each_node=True: all ranks save one checkpoint together, on storage that "
                "they share; set it to False"
            )

    # Saving.

    def _get_output_dir(self, trial: Any) -> str:
        return self._penstock.staging or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = self._get_output_dir(trial)
        step = self.state.global_step
        path = os.path.join(directory, f"checkpoint-{step}")
        saves = self._penstock
        is_stopping = os.path.exists(os.path.join(path, run.SENTINEL))
        if is_stopping:
            saves.wait()
            if saves.covers(path):
                return
        best_step = fitting.best_step_of(self.state)
        if best_step:
            # Whether the best one is there is known when the save under way has ended.
            saves.wait()
        best = self.state.best_model_checkpoint = saves.best_of(self.state.best_model_checkpoint)
        with saves.staged() as staging:
            super()._save_checkpoint(model, trial)
            self.state.best_model_checkpoint = self._best(directory, best_step) or best
            staged = os.path.join(staging, os.path.basename(path))
            if self.args.should_save:
                self.state.save_to_json(os.path.join(staged, run.STATE))
            files = files_in(staged)
        with self._rewound():
            is_saved = saves.save(
                path,
                self._training(),
                files,
                step=step,
                retained=Retained(self.args.save_total_limit, self.state.best_model_checkpoint),
                is_main=self.args.should_save,
                at_once=is_stopping or self.args.push_to_hub or self._are_uploaded(),
            )
        if not is_saved:
            self.state.best_model_checkpoint = best
        elif self.args.push_to_hub:
            super()._push_from_checkpoint(path)

    def _are_uploaded(self) -> bool:
        """Whether a callback takes checkpoints away; the same on all ranks."""
        if not self.penstock_settings.asynchronous:
            return False
        callbacks = self.callback_handler.callbacks
        # Some know it on the first rank only.
        return from_first(lambda: uploads.are_uploaded(callbacks))

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        # Transformers 4.49 replaces the name of the best checkpoint here, before the next is saved.
        self._penstock.best_of(self.state.best_model_checkpoint)
        return super()._determine_best_metric(*args, **kwargs)

    def _best(self, directory: str, step: int | None) -> str | None:
        """The checkpoint of the best step, if it is there, or about to be."""
        if not step:
            return None
        path = os.path.join(directory, f"checkpoint-{step}")
        is_there = step == self.state.global_step or run.lacking(path) is None
        return path if is_there else None

    def _training(self) -> penstock.Training:
        """What is saved."""
        if self.args.save_only_model:
            return penstock.Training(rng=False, **parts.weights(self.model))
        return parts.whole(self, self.penstock_settings.raw)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model as before; of a checkpoint, all but its weights."""
        if self._penstock.staging and self.is_fsdp_enabled:
            # It would gather them, or write nothing at all.
            self._save(output_dir)
            return
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._penstock.staging and not parts.has_adapters(self.model):
            # No weights: they are saved as tensors.
            state_dict = {}
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._penstock.staging:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        if not self._penstock.staging:
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if not self._penstock.staging:
            super()._save_rng_state(output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._penstock.staging:
            super()._push_from_checkpoint(checkpoint_folder)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._penstock.is_over:
            return
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._note_random()

    def _note_random(self) -> None:
        """Notes the random numbers that the next step begins with, see `_rewound`."""
        if getattr(self.args, "enable_jit_checkpoint", False):
            self._penstock_rng = (self.state.global_step, penstock.Training().state_dict())

    @contextlib.contextmanager
    def _rewound(self) -> Iterator[None]:
        """Where a step has begun that does not count, has the random numbers before it meanwhile.

        When a signal comes the Trainer saves in the middle of a step, which is then done again.
        """
        if self._penstock_rng is None or self._penstock_rng[0] != self.state.global_step:
            yield
            return
        generators = penstock.Training()
        now = generators.state_dict()
        generators.load_state_dict(self._penstock_rng[1])
        try:
            yield
        finally:
            generators.load_state_dict(now)

    # Loading.

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Trains as before.

        ``resume_from_checkpoint=True`` goes on from the newest complete checkpoint, and each newer
        one that is passed over is a `PenstockWarning`.

        Raises:
            IncompleteCheckpointError: The checkpoint lacks something.
            PenstockError: Whatever else loading and saving raise.
        """
        self.check_penstock()
        fitting.try_out(self)
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = from_first(self._newest) or True
        path = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        if path is not None and os.path.isdir(path):
            _check_resumable(path)
            fitting.warn_of_order()
        self._penstock_rng = None
        self._penstock_is_looked_at = self.args.save_strategy == "no"
        with self._penstock.running(path):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _newest(self) -> str | None:
        """The newest complete checkpoint; None where there are none at all.

        Raises:
            IncompleteCheckpointError: There are some, and none is complete.
        """
        directory = self.args.output_dir or "."
        path = run.newest_checkpoint(directory)
        found = run.find(directory) if path is None else []
        if found:
            raise IncompleteCheckpointError(
                f"{directory} has no complete checkpoint: the newest is {found[0].path}, and "
                f"{found[0].lacks}; train without resume_from_checkpoint to begin anew",
                path=directory,
            )
        return path

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self._was_over():
            return
        self._note_random()
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of a step; none where the run that is resumed had done all its steps."""
        if not self._penstock_is_looked_at:
            # Made before the first step, a `Training` says what the first save could not store.
            self._penstock_is_looked_at = True
            self._training()
        # Trainers before 5.3 have no `_run_epoch`.
        return ([], None) if self._was_over() else super().get_batch_samples(*args, **kwargs)

    def _was_over(self) -> bool:
        """Whether a run goes on that was killed after its last save; ends it then.

        The Trainer would find out after one more step.
        """
        saves = self._penstock
        if saves.resumed and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = saves.is_over = True
        return saves.is_over

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not is_checkpoint(resume_from_checkpoint) or parts.has_adapters(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif resume_from_checkpoint != self._penstock.resumed:
            weights = model or self.model
            parts.restore_weights(resume_from_checkpoint, weights, self.penstock_settings)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        parts.restore(self, checkpoint, self.penstock_settings)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)
        else:
            # Once more, as numbers have been drawn since all was loaded.
            options = self.penstock_settings.options
            penstock.load(checkpoint, into=penstock.Training(), keys="rng.*", options=options)
        self._note_random()

    def _load_best_model(self) -> None:
        best = self._settle_best()
        if best is None:
            # Its save failed, which was a warning.
            return
        if not is_checkpoint(best) or parts.has_adapters(self.model):
            super()._load_best_model()
        else:
            parts.restore_weights(best, self.model, self.penstock_settings)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        self._finish(self._get_output_dir(trial))
        return super()._finalize_training(trial, *args, **kwargs)  # type: ignore[no-untyped-call]

    def _sorted_checkpoints(self, output_dir: str | None = None, *_: Any, **__: Any) -> list[str]:
        """The checkpoints that a Trainer before 5.3 would delete: none, as `Saves` does."""
        if output_dir is not None and not self._penstock.staging:
            # It asks at the end of the training, and has no `_finalize_training`.
            self._finish(output_dir)
        return []

    def _finish(self, directory: str) -> None:
        """Waits for the last save, and leaves the best checkpoint alone where one is to stay."""
        best = self._settle_best()
        if self.args.should_save and best is not None and self.args.save_total_limit == 1:
            for found in run.find(directory):
                if os.path.realpath(found.path) != os.path.realpath(best):
                    run.remove(found.path)

    def _settle_best(self) -> str | None:
        """The best checkpoint; where its save failed, and training went on, the one before it."""
        saves = self._penstock
        saves.wait()
        best = self.state.best_model_checkpoint = saves.best_of(self.state.best_model_checkpoint)
        return best

    @property
    def _penstock(self) -> Saves:
        if self._penstock_saves is None:
            self._penstock_saves = Saves(self.penstock_settings)
        return self._penstock_saves


def _check_resumable(path: str) -> None:
    """Refuses a checkpoint that lacks what a training goes on with.

    Raises:
        IncompleteCheckpointError: It is half-written, or holds weights only.
        PenstockError: Whatever else `penstock.inspect` raises.
    """
    remedy = "load them with from_pretrained, and train without resume_from_checkpoint"
    if is_checkpoint(path):
        saved = penstock.inspect(path).metadata.get("trainer", {}).get("parts")
        if saved is not None and "rng" not in saved:
            raise StateMismatchError(
                f"{path} holds weights only, as save_only_model=True was set: {remedy}",
                key="optimizer",
                path=path,
            )
        if not os.path.isfile(os.path.join(path, run.STATE)):
            raise IncompleteCheckpointError(
                f"{path} lacks {run.STATE}: no Trainer has saved it, or somebody has removed it",
                path=path,
            )
        return
    lacks = run.lacking(path)
    if lacks is not None:
        raise IncompleteCheckpointError(
            f"{path} is no complete checkpoint: {lacks}; resume from another, or from the newest "
            "complete one with resume_from_checkpoint=True",
            path=path,
        )
    missing = run.lacking_to_resume(path)
    if missing:
        raise IncompleteCheckpointError(
            f"{path} lacks {' and '.join(missing)}, without which the Trainer would go on with new "
            f"ones; if weights are all that is wanted, {remedy}",
            path=path,
        )
