"""`attach`: makes an `Accelerator` save and load its state through Penstock."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import penstock
from penstock import Saver
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    PenstockWarning,
    UnsupportedStateError,
)
from penstock.integrations.accelerate import directories, fitting, parts
from penstock.integrations.accelerate.loader import PreparedLoader, keep_position
from penstock.integrations.accelerate.parts import REMEDY, training_of
from penstock.integrations.first_rank import from_first
from penstock.integrations.versions import check_version
from penstock.plugin import Groups, SealingKeys, is_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock import Training
    from penstock.options import Options
    from penstock.plugin import Files
    from penstock.sealing import Identities, Key, Sealing
    from penstock.signing import SignatureKey, Signers, SigningKeys

_Accelerator = TypeVar("_Accelerator")

_ELSEWHERE = {
    "DEEPSPEED": (
        "its engine saves by itself: "
        "penstock.integrations.deepspeed.checkpoint_engine.attach(engine) for Penstock"
    ),
    "MEGATRON_LM": "Megatron-LM saves by itself",
    "XLA": "states of XLA devices are not supported",
}


def attach(
    accelerator: _Accelerator,
    *,
    background: bool = False,
    lazy: bool = False,
    pickled: Iterable[str] = (),
    trust: bool = False,
    groups: Mapping[str, str] | None = None,
    files: Files | None = None,
    options: Options | None = None,
    sealing: Sealing | None = None,
    identities: Identities | Key | Iterable[Key] | None = None,
    sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> _Accelerator:
    """Makes ``save_state`` and ``load_state`` of an accelerator use Penstock.

    Call it once, before or after ``prepare``, on every process.

    Args:
        accelerator: An `accelerate.Accelerator`.
        background: Whether ``save_state`` returns once the state is copied, and writes it while
            training goes on. The error of a failed save is raised by the next ``save_state`` or
            ``load_state``, or by ``end_training``, which wait for it.
        lazy: Whether a background save also copies the state while training goes on, up to the next
            step of an optimizer; see `penstock.CheckpointStore.save_async`.
        pickled: Names, as `penstock.inspect` shows them, of values that only pickle can store, such
            as ``"custom_checkpoint_0.config"``, or patterns of `fnmatch` for them. They are stored
            as pickled bytes. Only for schedulers, data loaders, and custom objects that are no
            modules.
        trust: Whether ``load_state`` unpickles such values, which can run any code.
        groups: Models to store so that other programs find them, such as ``{"model": ""}``; see
            `penstock.save`.
        files: Small files to store beside them in each checkpoint; see `penstock.save`.
        options: Settings of the I/O; None for ``penstock.Options()``.
        sealing: For whom checkpoints are sealed; see `penstock.save`. Hooks of ``save_state`` would
            write clear files beside them, so a save with hooks is refused.
        identities: Keys that open sealed checkpoints; see `penstock.load`. With either, clear
            checkpoints are refused, also those of Accelerate's own.
        sign: Private keys that sign checkpoints while they are saved; see `penstock.save`. A save
            with hooks is refused.
        signed_by: Public keys of which one must have signed a checkpoint; see `penstock.load`.
            Those of Accelerate's own are refused then.

    Returns:
        The accelerator itself.

    Raises:
        MissingDependencyError: Accelerate is too old, or has changed what the plug-in uses; the
            message names the changes.
        UnsupportedStateError: Its way of training keeps state that it does not hold itself.
        ValueError: Arguments contradict each other, or the plug-in is enabled already.
        CannotSealError: ``groups`` or ``files`` are given with ``sealing``, and would stay clear.
    """
    check_version("accelerate", "1.6", "1.15")
    fitting.check_accelerator(accelerator)
    keep_position()
    if lazy and not background:
        raise ValueError("lazy=True: only what is saved in the background can be copied later")
    _check(accelerator)
    Groups.check(groups)
    keys = SealingKeys.of(sealing, identities, sign=sign, signed_by=signed_by)
    if groups or files:
        keys.refuse_sealing("attach", "groups= and files= stay clear, for readers of models")
    further = {"groups": groups, "files": files}
    saves = _Saves(accelerator, background, lazy, tuple(pickled), trust, options, further, keys)
    for name in ("save_state", "load_state", "end_training"):
        setattr(accelerator, name, getattr(saves, name))
    for name in ("prepare", "register_for_checkpointing"):
        setattr(accelerator, name, _checking(accelerator, name, saves.check))
    return accelerator


def _checking(accelerator: Any, name: str, check: Callable[[], None]) -> Callable[..., Any]:
    """Wraps a method that adds a part to an accelerator, to check that the part can be saved."""
    theirs = getattr(accelerator, name)

    @functools.wraps(theirs)
    def checked(*arguments: Any, **further: Any) -> Any:
        found = theirs(*arguments, **further)
        check()
        return found

    return checked


def _check(accelerator: Any) -> None:
    if isinstance(getattr(accelerator.save_state, "__self__", None), _Saves):
        raise ValueError("penstock is enabled for this accelerator already")
    kind = accelerator.distributed_type.name
    if kind in _ELSEWHERE:
        raise UnsupportedStateError(
            f"accelerate with {kind} is not supported: {_ELSEWHERE[kind]}", key="accelerator"
        )
    if accelerator.project_configuration.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True: all processes save one checkpoint, on a file system that they "
            "share: give a directory of one and leave this away"
        )


def _choice(error: UnsupportedStateError) -> UnsupportedStateError:
    """The error, with pickling as a remedy."""
    return UnsupportedStateError(
        f"{error}; or store it as pickle: attach(accelerator, pickled=[{error.key!r}]), for custom "
        "objects, schedulers and loaders",
        key=error.key,
    )


class _Saves:
    """Methods that replace those of an accelerator."""

    _is_trial = False

    def __init__(
        self,
        accelerator: Any,
        background: bool,
        lazy: bool,
        pickled: tuple[str, ...],
        trust: bool,
        options: Options | None,
        further: dict[str, Any],
        keys: SealingKeys,
    ) -> None:
        self._accelerator = accelerator
        self._background, self._lazy = background, lazy
        self._pickled, self._trust, self._options = pickled, trust, options
        self._further = further
        self._keys = keys
        self._saver = Saver(options=options, **keys.closing)
        self._warned: set[int] = set()

    def _of(self, accelerator: Any) -> _Saves:
        """The same for the accelerator of a trial, with default settings and no keys.

        A job that seals need not have identities to load with.
        """
        saves = _Saves(accelerator, False, False, (), False, self._options, {}, SealingKeys())
        saves._is_trial = True
        return saves

    def check(self) -> None:
        """Raises `UnsupportedStateError` if a part cannot be saved; the message names it."""
        try:
            parts.check(self._accelerator, self._pickled)
        except UnsupportedStateError as error:
            raise _choice(error) from error

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, *_: Any, **further: Any
    ) -> Path:
        """Saves all of the accelerator's state in one commit.

        Takes the arguments of ``Accelerator.save_state``; ``safe_serialization`` has no effect.
        """
        further.pop("safe_serialization", None)
        _refuse(further, "save_state")
        project = self._accelerator.project_configuration
        path = self._destination(output_dir)
        if self._accelerator._save_model_state_pre_hook:
            what = "hooks of save_state write clear files beside the checkpoint"
            self._keys.refuse_sealing(path, what)
            what = "hooks of save_state write files that are not signed"
            self._keys.refuse_signing(path, what)
        if not self._is_trial:
            fitting.try_out(self._accelerator, os.path.dirname(path), self._of)
        self._warn()
        limit = project.total_limit if project.automatic_checkpoint_naming else None

        def after() -> None:
            if limit is not None:
                directories.retire(path, limit, self._accelerator)

        settings: dict[str, Any] = {
            "step": project.iteration if project.automatic_checkpoint_naming else None,
            "metadata": {"by": "accelerate", "pickled": list(self._pickled)},
            # As in Accelerate, only directories with automatic names are never written again.
            "overwrite": not project.automatic_checkpoint_naming,
            **self._further,
        }
        try:
            training = self._training(self._unsaved_models(path))
            if self._background:
                self._saver.save_async(path, training, lazy=self._lazy, after=after, **settings)
            else:
                self._saver.save(path, training, **settings)
                if self._accelerator.is_main_process:
                    after()
        except UnsupportedStateError as error:
            raise _choice(error) from error
        project.iteration += 1
        return Path(path)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **further: Any,
    ) -> None:
        """Restores all of the accelerator's state, or raises.

        Takes the arguments of ``Accelerator.load_state``. Those about reading files apply only to
        checkpoints that Accelerate wrote itself.
        """
        self._saver.wait()
        accelerator = self._accelerator
        path = self._source(input_dir)
        if is_checkpoint(path) or not directories.is_theirs(path):
            further.pop("map_location", None)
            _refuse(further, "load_state")
            self._load(path)
        else:
            self._keys.refuse_clear(path, "a checkpoint of Accelerate's own")
            directories.check(path, accelerator, self._keys)
            if load_kwargs is not None:
                # Accelerate takes it since 1.8.
                further["load_kwargs"] = load_kwargs
            type(accelerator).load_state(accelerator, path, **further)
        number = directories.number_of(path)
        if accelerator.project_configuration.automatic_checkpoint_naming and number is not None:
            # The next save gets a new name: Accelerate would refuse an existing one.
            accelerator.project_configuration.iteration = number + 1

    def end_training(self) -> None:
        """Waits for the save in progress, and ends training as Accelerate does."""
        try:
            self._saver.close()
        finally:
            type(self._accelerator).end_training(self._accelerator)

    def _load(self, path: str) -> None:
        found = penstock.inspect(path, identities=self._keys.identities)
        if found.metadata.get("pickled") and not self._trust:
            names = ", ".join(found.metadata["pickled"])
            raise UnsupportedStateError(
                f"{path}: {names} are stored as pickle, which can run any code: {REMEDY} if you "
                "trust whoever wrote them",
                key=found.metadata["pickled"][0],
            )
        models = list(self._accelerator._models)
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(models, path)
        training = self._training(models)
        penstock.load(path, into=training, options=self._options, **self._keys.opening)
        self._accelerator.step = training.accelerator["step"]
        self._accelerator.project_configuration.iteration = training.accelerator["iteration"] + 1

    def _training(self, models: list[Any]) -> Training:
        return training_of(self._accelerator, models, self._pickled, trust=self._trust)

    def _unsaved_models(self, path: str) -> list[Any]:
        """Calls all hooks, and returns the models that none of them has saved."""
        accelerator = self._accelerator
        hooks = list(accelerator._save_model_state_pre_hook.values())
        if not hooks:
            return list(accelerator._models)
        os.makedirs(path, exist_ok=True)
        is_sharded = accelerator.distributed_type.name == "FSDP"
        # Accelerate gives hooks no weights of sharded models, and ignores their changes.
        models = [] if is_sharded else list(accelerator._models)
        checked = [accelerator.get_state_dict(one, unwrap=False) for one in models]
        weights = list(checked)
        for hook in hooks:
            hook(accelerator._models, weights, path)
        if any(all(one is not known for known in checked) for one in weights):
            raise UnsupportedStateError(
                "a hook of save_state has put other weights in the place of a model's: save them "
                "in the hook, and take the model's out of the list",
                key="model",
            )
        directories.sync_further(path)
        if is_sharded:
            return list(accelerator._models)
        pairs = zip(models, checked, strict=True)
        return [model for model, state in pairs if any(state is one for one in weights)]

    def _destination(self, output_dir: str | os.PathLike[str] | None) -> str:
        accelerator = self._accelerator
        if accelerator.project_configuration.automatic_checkpoint_naming:
            name = f"checkpoint_{accelerator.save_iteration}"
            path = os.path.join(accelerator.project_dir, "checkpoints", name)
        elif output_dir is None:
            raise ValueError("no output_dir is given, and automatic checkpoint naming is disabled")
        else:
            path = os.path.expanduser(output_dir)
        path = os.path.abspath(path)
        is_ours = is_checkpoint(path)
        if is_ours and accelerator.project_configuration.automatic_checkpoint_naming:
            raise CheckpointExistsError(
                f"{path} is there already, of a run that went further: move what is newer away, "
                "load_state() it, or set project_configuration.iteration",
                path=path,
            )
        if not is_ours and directories.is_theirs(path):
            raise CheckpointExistsError(
                f"{path} holds what accelerate saved itself: save to another directory, with "
                "automatic naming load_state() first or set project_configuration.iteration",
                path=path,
            )
        return path

    def _source(self, input_dir: str | os.PathLike[str] | None) -> str:
        accelerator = self._accelerator
        if input_dir is not None:
            path = os.path.abspath(os.path.expanduser(input_dir))
            if not os.path.isdir(path):
                raise CheckpointNotFoundError(
                    f"{path} is not there, or no directory: give one that save_state made",
                    path=path,
                )
            return path
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            raise ValueError("no input_dir is given, and automatic checkpoint naming is disabled")
        root = os.path.join(accelerator.project_dir, "checkpoints")
        return from_first(lambda: directories.newest(root, accelerator, self._keys))

    def _warn(self) -> None:
        """Warns of state that no checkpoint will hold."""
        accelerator = self._accelerator
        for index, loader in enumerate(accelerator._dataloaders):
            if index not in self._warned and PreparedLoader(loader).loses_order():
                self._warned.add(index)
                warnings.warn(
                    f"loader {index} is saved in the middle of an epoch whose shuffled order "
                    "cannot come back: use DataLoaderConfiguration(use_seedable_sampler=True)",
                    PenstockWarning,
                    stacklevel=3,
                )
        if not accelerator.sync_gradients:
            warnings.warn(
                "save_state between two steps of the optimizer: gradients that are accumulated so "
                "far are not saved; save where accelerator.sync_gradients is True",
                PenstockWarning,
                stacklevel=3,
            )


def _refuse(further: dict[str, Any], method: str) -> None:
    if further:
        names = ", ".join(sorted(further))
        raise TypeError(f"{method}({names}=…): of no meaning to a checkpoint of Penstock's")
