"""`PenstockTrainerMixin`: makes a Trainer's checkpoints Penstock's.

The Trainer's own `_save_checkpoint` runs, and that of a derived class, but it writes to a staging
directory (`_get_output_dir`), and writes no weights, optimizer, scheduler and random states. The
small files that it writes are stored in the checkpoint.

On resume the weights are loaded together with everything else, once optimizer and scheduler exist:
all of it is read and verified before anything changes.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import penstock
from penstock.errors import (
    IncompleteCheckpointError,
    SealedError,
    StateMismatchError,
    UnsupportedStateError,
)
from penstock.integrations.first_rank import from_first
from penstock.integrations.transformers import fitting, parts, run
from penstock.integrations.transformers.saves import Retained, Saves, files_in
from penstock.integrations.transformers.settings import Settings
from penstock.integrations.versions import check_version
from penstock.plugin import OpenCheckpoint, is_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from transformers import Trainer as _Base

    from penstock.plugin import SealingKeys
else:
    _Base = object

check_version("transformers", "4.49", "5.24")


class PenstockTrainerMixin(_Base):
    """Makes a trainer save and load with Penstock; put it before the trainer's class.

    ``class MyTrainer(PenstockTrainerMixin, Trainer)``. For an existing trainer `attach` does the
    same.

    Attributes:
        penstock_settings: How it saves; set it in the class, or on a trainer before it trains.
        penstock_saves: Its saves; None before the first.
    """

    penstock_settings: Settings = Settings()
    penstock_saves: Saves | None = None
    _penstock_rng: tuple[int, dict[str, Any]] | None = None
    _penstock_is_looked_at = False

    def check_penstock(self) -> None:
        """Refuses versions that do not fit, and trainers whose backend saves checkpoints by itself.

        Raises:
            MissingDependencyError: This version of the Trainer differs; the message says where.
            UnsupportedStateError: DeepSpeed or XLA saves the model.
            ValueError: An argument of the training does not work with Penstock.
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
        self._check_sealing()
        if self.penstock_settings.save_every is not None and self.args.save_strategy != "no":
            raise ValueError(
                "save_every says when to save: set save_strategy='no' in the TrainingArguments"
            )

    def _check_sealing(self) -> None:
        """Refuses what a sealed checkpoint cannot hold."""
        keys, where = self.penstock_settings.keys, self.args.output_dir or "."
        if self.args.push_to_hub:
            keys.refuse_sealing(where, "push_to_hub=True uploads the model in the clear")
        if not self.args.load_best_model_at_end or keys.sealing is None:
            return
        if not keys.can_open:
            raise SealedError(
                f"{where}: load_best_model_at_end reads a sealed checkpoint: give identities=, too",
                path=where,
            )
        if parts.has_adapters(self.model):
            what = "PEFT loads the best adapters from clear files (load_best_model_at_end)"
            keys.refuse_sealing(where, what)

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
            # Whether the best checkpoint exists is known once the save in progress has ended.
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
        """Whether a callback uploads checkpoints; the same on all ranks."""
        if not self.penstock_settings.background:
            return False
        callbacks = self.callback_handler.callbacks
        # Some callbacks know only on the first rank.
        return from_first(lambda: _are_uploaded(callbacks))

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        # Transformers 4.49 replaces the best checkpoint's name here, before the next save.
        self._penstock.best_of(self.state.best_model_checkpoint)
        return super()._determine_best_metric(*args, **kwargs)

    def _best(self, directory: str, step: int | None) -> str | None:
        """The checkpoint of the best step, if it exists or is about to."""
        if not step:
            return None
        path = os.path.join(directory, f"checkpoint-{step}")
        is_there = step == self.state.global_step or run.lacking(path) is None
        return path if is_there else None

    def _training(self) -> penstock.Training:
        """The state to save."""
        settings = self.penstock_settings
        is_sealed = settings.sealing is not None
        if self.args.save_only_model:
            files = {parts.FILES: {}} if is_sealed else {}
            return penstock.Training(rng=False, **parts.weights(self.model), **files)
        return parts.whole(self, settings.pickled, has_files=is_sealed)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model as before; within a checkpoint, all but its weights."""
        if self._penstock.staging and self.is_fsdp_enabled:
            # `save_model` would gather the weights, or write nothing at all.
            self._save(output_dir)
            return
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._penstock.staging and not parts.has_adapters(self.model):
            # Without weights, which are saved as tensors.
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
        self.control.should_save |= self._is_due()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.control.should_training_stop and self._is_due():
            # A callback has stopped the training after the evaluation.
            self.control.should_save = True
            super()._maybe_log_save_evaluate(*args, **kwargs)
        self._note_random()

    def _is_due(self) -> bool:
        """Whether to save after the present step."""
        step = self.state.global_step
        is_last = step >= self.state.max_steps or self.control.should_training_stop
        return self._penstock.is_due(step, is_last=is_last)

    def _note_random(self) -> None:
        """Records the random states before the next step, see `_rewound`."""
        if getattr(self.args, "enable_jit_checkpoint", False):
            self._penstock_rng = (self.state.global_step, penstock.Training().state_dict())

    @contextlib.contextmanager
    def _rewound(self) -> Iterator[None]:
        """Restores the random states from before an unfinished step, within the context.

        On a signal the Trainer saves in the middle of a step, which the resumed run repeats.
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

        ``resume_from_checkpoint=True`` resumes from the newest complete checkpoint, with a
        `PenstockWarning` for each newer one that it skips.

        Raises:
            IncompleteCheckpointError: The checkpoint is incomplete.
            PenstockError: As for loading and saving.
        """
        self.check_penstock()
        fitting.try_out(self)
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = from_first(self._newest) or True
        path = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        if path is not None and os.path.isdir(path):
            _check_resumable(path, self.penstock_settings.keys)
            fitting.warn_of_order()
        self._penstock_rng = None
        has_saves = self.args.save_strategy != "no" or self.penstock_settings.save_every is not None
        self._penstock_is_looked_at = not has_saves
        saves = self._penstock
        with saves.running(path, self.args.output_dir or "."), saves.opened(path) as opened:
            return super().train(opened or resume_from_checkpoint, *args, **kwargs)

    def _newest(self) -> str | None:
        """The newest complete checkpoint; None if there are none at all."""
        directory = self.args.output_dir or "."
        path = run.newest_by(directory, self.penstock_settings.keys, stacklevel=4)
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
        """The batches of a step; none if the resumed run had finished all its steps."""
        if not self._penstock_is_looked_at:
            # Making a `Training` before the first step raises what the first save would.
            self._penstock_is_looked_at = True
            self._training()
        # Trainers before 5.3 have no `_run_epoch`.
        return ([], None) if self._was_over() else super().get_batch_samples(*args, **kwargs)

    def _was_over(self) -> bool:
        """Whether the resumed run was killed after its last step's save; ends it then.

        The Trainer would notice only after one more step.
        """
        saves = self._penstock
        if saves.resumed and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = saves.is_over = True
        return saves.is_over

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        stored = self._penstock.stored(resume_from_checkpoint)
        if not is_checkpoint(stored) or parts.has_adapters(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif stored != self._penstock.resumed:
            weights = model or self.model
            parts.restore_weights(stored, weights, self.penstock_settings)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        checkpoint = self._stored(checkpoint)
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        began = time.perf_counter()
        parts.restore(self, checkpoint, self.penstock_settings)
        # Some Trainers load their own state, with the step, later.
        keys = self.penstock_settings.keys.identities
        step = penstock.inspect(checkpoint, identities=keys).step
        self._penstock.loaded(step, time.perf_counter() - began)

    def _stored(self, checkpoint: str | None) -> str | None:
        return None if checkpoint is None else self._penstock.stored(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        checkpoint = self._stored(checkpoint)
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        checkpoint = self._stored(checkpoint)
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)
        else:
            # Again, as random numbers were drawn since everything was loaded.
            settings = self.penstock_settings
            penstock.load(
                checkpoint,
                into=penstock.Training(),
                keys="rng.*",
                options=settings.options,
                identities=settings.keys.identities,
            )
        self._note_random()

    def _load_best_model(self) -> None:
        best = self._resolve_best()
        if best is None:
            # Its save failed with a warning.
            return
        if not is_checkpoint(best) or parts.has_adapters(self.model):
            super()._load_best_model()
        else:
            parts.restore_weights(best, self.model, self.penstock_settings)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        self._finish(self._get_output_dir(trial))
        return super()._finalize_training(trial, *args, **kwargs)  # type: ignore[no-untyped-call]

    def _sorted_checkpoints(self, output_dir: str | None = None, *_: Any, **__: Any) -> list[str]:
        """The checkpoints for a Trainer before 5.3 to delete: none, as `Saves` deletes them."""
        if output_dir is not None and not self._penstock.staging:
            # Called at the end of training, for lack of a `_finalize_training`.
            self._finish(output_dir)
        return []

    def _finish(self, directory: str) -> None:
        """Waits for the last save; if only one checkpoint is to stay, keeps the best one alone."""
        best = self._resolve_best()
        if self.args.should_save and best is not None and self.args.save_total_limit == 1:
            for found in run.find(directory):
                if os.path.realpath(found.path) != os.path.realpath(best):
                    run.remove(found.path)

    def _resolve_best(self) -> str | None:
        """The best checkpoint; if its save failed and training went on, the best one before it."""
        saves = self._penstock
        saves.wait()
        best = self.state.best_model_checkpoint = saves.best_of(self.state.best_model_checkpoint)
        return best

    @property
    def _penstock(self) -> Saves:
        if self.penstock_saves is None:
            self.penstock_saves = Saves(self.penstock_settings)
        return self.penstock_saves


def _check_resumable(path: str, keys: SealingKeys) -> None:
    """Refuses a checkpoint from which training cannot resume."""
    remedy = "load them with from_pretrained, and train without resume_from_checkpoint"
    if is_checkpoint(path):
        # Raises if it is sealed and there are no identities.
        OpenCheckpoint(path, unsealing=keys.unsealing).release()
        note = penstock.inspect(path, identities=keys.identities).metadata.get("trainer", {})
        saved = note.get("parts")
        if saved is not None and "rng" not in saved:
            raise StateMismatchError(
                f"{path} holds weights only, as save_only_model=True was set: {remedy}",
                key="optimizer",
                path=path,
            )
        is_there = run.STATE in note.get(parts.FILES, ())
        if not is_there and not os.path.isfile(os.path.join(path, run.STATE)):
            raise IncompleteCheckpointError(
                f"{path} lacks {run.STATE}: no Trainer has saved it, or somebody has removed it",
                path=path,
            )
        return
    keys.refuse_clear(path, "a checkpoint of the Trainer's own")
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


_UPLOADING: dict[str, Callable[[Any], object]] = {
    "ClearMLCallback": lambda callback: callback._log_model,
    "DVCLiveCallback": lambda callback: callback._log_model == "all",
    "FlyteCallback": lambda callback: callback.sync_checkpoints,
    "MLflowCallback": lambda callback: callback._log_artifacts,
    "NeptuneCallback": lambda callback: callback._should_upload_checkpoint,
    "RayTrainReportCallback": lambda callback: True,
    "WandbCallback": lambda callback: callback._log_model == "checkpoint",
}
"""Tells whether a callback of transformers or Ray does so, by its class."""


def _are_uploaded(callbacks: Iterable[Any]) -> bool:
    """Whether a callback copies or uploads checkpoints, which must be complete by then."""
    return any(
        _UPLOADING[kind.__name__](callback)
        for callback in callbacks
        for kind in type(callback).__mro__
        if kind.__name__ in _UPLOADING and kind.__module__.startswith(("transformers.", "ray."))
    )
