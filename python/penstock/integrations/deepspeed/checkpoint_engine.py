"""A checkpoint engine for DeepSpeed: all files of a tag, of all ranks, are one Penstock checkpoint.

`install` before ``deepspeed.initialize``, or `attach` behind it. A tag is complete when its
manifest is there, and only then ``latest`` names it. Tags that DeepSpeed wrote itself are loaded by
its own code.
"""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deepspeed.runtime.engine as runtime
from deepspeed import comm
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import penstock
from penstock import Saver, Training
from penstock.errors import (
    CheckpointExistsError,
    PenstockError,
    PenstockWarning,
    StateMismatchError,
    UnsupportedStateError,
)
from penstock.integrations import raw
from penstock.integrations.deepspeed import tags, values
from penstock.integrations.deepspeed.to_torch import to_torch
from penstock.integrations.versions import check_version
from penstock.loading.foreign import is_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.options import Options
    from penstock.saving.pending import PendingSave

__all__ = ["PenstockCheckpointEngine", "attach", "install", "to_torch"]


@dataclass(frozen=True, slots=True)
class _Settings:
    background: bool
    lazy: bool
    rng: bool
    pickled: tuple[str, ...]
    trust: bool
    options: Options | None


def install(
    *,
    background: bool = False,
    lazy: bool = False,
    rng: bool = True,
    pickled: Iterable[str] = (),
    trust: bool = False,
    options: Options | None = None,
) -> None:
    """Has every engine that ``deepspeed.initialize`` builds save and load by Penstock.

    Args:
        background: Whether ``save_checkpoint`` returns as soon as the state is copied. A save that
            failed raises its error from the next one, from ``load_checkpoint`` or ``destroy``.
        lazy: Whether, in the background, the state is also copied while training goes on, up to the
            next step; see `penstock.CheckpointStore.save_async`.
        rng: Whether the random states of each rank are saved, and restored where the optimizer is.
        pickled: Names of values that only pickle can store, such as
            ``"mp_rank_00_model_states.pt.args"``, or patterns of `fnmatch` over them.
        trust: Whether such values are unpickled, which can run any code.
        options: How bytes move; None for ``penstock.Options()``.

    Raises:
        MissingDependencyError: The version of DeepSpeed is one that was not tried.
        ValueError: ``lazy`` without ``background``.
    """
    settings = _checked(background, lazy, rng, pickled, trust, options)
    runtime.create_checkpoint_engine = lambda *_, **__: PenstockCheckpointEngine(settings)


def attach(
    engine: Any,
    *,
    background: bool = False,
    lazy: bool = False,
    rng: bool = True,
    pickled: Iterable[str] = (),
    trust: bool = False,
    options: Options | None = None,
) -> None:
    """Has one engine, as ``deepspeed.initialize`` returned it, save and load by Penstock.

    See `install` for the arguments and errors.
    """
    settings = _checked(background, lazy, rng, pickled, trust, options)
    engine.checkpoint_engine = PenstockCheckpointEngine(settings)


def _checked(
    background: bool,
    lazy: bool,
    rng: bool,
    pickled: Iterable[str],
    trust: bool,
    options: Options | None,
) -> _Settings:
    check_version("deepspeed", "0.19.8", "0.19.8")
    if lazy and not background:
        raise ValueError("lazy=True: only what is saved in the background can be copied later")
    _take_over()
    return _Settings(background, lazy, rng, tuple(pickled), trust, options)


class PenstockCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed hands each file of a tag to."""

    def __init__(self, settings: _Settings) -> None:
        super().__init__()
        self.name = "PenstockCheckpointEngine"
        self._settings = settings
        self._saver = Saver(options=settings.options)
        self._theirs = TorchCheckpointEngine()
        self._info: Any = None
        self._files: dict[str, Any] | None = None
        self._pending: PendingSave | None = None

    # What DeepSpeed calls.

    def create(self, info: Any) -> None:
        """Learns what is going to be saved."""
        self._info = info

    def save(self, state_dict: Any, path: str) -> None:
        """Keeps a file of the tag for `finish`; what belongs to no tag is saved as a file."""
        if self._files is None:
            self._theirs.save(state_dict, path)
            return
        above, name = os.path.split(os.path.abspath(path))
        if above != self._directory:
            raise PenstockError(f"{path} lies outside of the tag {self._directory}")
        if os.path.exists(path) and not tags.is_stub(path):
            raise CheckpointExistsError(
                f"{path} was saved by DeepSpeed itself: save under another tag, or delete it",
                path=path,
            )
        self._files[name] = raw.packed(values.plain(state_dict), name, self._settings.pickled)

    def load(self, path: str, map_location: Any = None) -> Any:
        """A file of a tag, of ours or of DeepSpeed's own."""
        self._saver.wait()
        if not tags.is_stub(path):
            return self._theirs.load(path, map_location)
        settings = self._settings
        # Others are functions that leave everything on the host.
        device = None if callable(map_location) else map_location
        return tags.read_file(path, trust=settings.trust, options=settings.options, device=device)

    def commit(self, info: Any) -> bool:
        """Nothing: a tag is committed by `finish`, when it is known that nothing follows."""
        return True

    def is_decoupled(self) -> bool:
        """Whether saves go on in the background; then the next method is called before a step."""
        return self._settings.background

    def get_commit_info(self) -> None:
        """None, on all ranks alike: commits wait for nobody. Copies first what a step changes."""
        if self._pending is not None:
            self._pending.stage()
            self._pending = None

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors have to be cloned, as `torch.save` stores all that they are views of."""
        return False

    def cleanup(self) -> None:
        """Waits for the save under way.

        Raises:
            PenstockError: It failed.
        """
        self._saver.close()

    # What the methods of DeepSpeed's engine call that take the place of its own.

    def begin(self) -> None:
        """Files that come from now on are those of a tag."""
        self._files = {}

    def abandon(self) -> None:
        """They are not any more."""
        self._files = None

    def finish(self, step: int, *, moves_latest: bool) -> None:
        """Saves all files of all ranks in one commit, and has ``latest`` name them then."""
        files, self._files = self._files or {}, None
        settings, directory, info = self._settings, self._directory, self._info
        os.makedirs(directory, exist_ok=True)
        for name in files:
            tags.put_stub(os.path.join(directory, name))
        state: dict[str, Any] = {"files": files}
        if settings.rng:
            state["rng"] = Training().state_dict()["rng"]

        def after() -> None:
            if moves_latest:
                tags.write(
                    os.path.join(os.path.abspath(info.save_dir), "latest"), info.tag.encode()
                )

        further: dict[str, Any] = {
            "step": step,
            "metadata": {"by": "deepspeed", "pickled": list(settings.pickled)},
            "overwrite": True,
        }
        try:
            if settings.background:
                self._pending = self._saver.save_async(
                    directory, state, lazy=settings.lazy, after=_told(after), **further
                )
                return
            self._saver.save(directory, state, **further)
        except UnsupportedStateError as error:
            key = error.key.removeprefix("files.")
            raise UnsupportedStateError(
                f"{error}; or store it as pickle: install(pickled=[{key!r}])", key=key
            ) from error
        try:
            if comm.get_rank() == 0:
                after()
        finally:
            comm.barrier()

    def restore_random_states(self, path: str) -> None:
        """Sets the generators of this rank as they were.

        Raises:
            StateMismatchError: They were not saved.
        """
        if not self._settings.rng or not is_checkpoint(path):
            return
        try:
            state = penstock.load(path, keys="rng.*", options=self._settings.options)
        except StateMismatchError as error:
            raise StateMismatchError(
                f"{path} was saved without random states: install(rng=False) restores none",
                key="rng",
                path=path,
            ) from error
        Training().load_state_dict(state)

    @property
    def _directory(self) -> str:
        path: str = os.path.join(self._info.save_dir, self._info.tag)
        return os.path.abspath(path)


def _told(after: Any) -> Any:
    """A function whose failure is a warning: nobody hears of what it raises in the background."""

    def call() -> None:
        try:
            after()
        except PenstockError as error:
            warnings.warn(f"a tag is saved, but not the latest: {error}", PenstockWarning, 2)

    return call


def _take_over() -> None:
    """Has the methods of DeepSpeed's engine tell ours of the beginning and the end of a tag."""
    cls = runtime.DeepSpeedEngine
    if hasattr(cls.save_checkpoint, "__wrapped__"):
        return
    save, load = cls.save_checkpoint, cls.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        ours, client_state = self.checkpoint_engine, client_state or {}
        if not isinstance(ours, PenstockCheckpointEngine):
            return save(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        _check(self)
        ours.begin()
        try:
            # It would write ``latest`` in place, before anything is durable.
            done = save(self, save_dir, tag, client_state, False, exclude_frozen_parameters)
        except BaseException:
            ours.abandon()
            raise
        ours.finish(self.global_steps, moves_latest=save_latest)
        return done

    @functools.wraps(load)
    def load_checkpoint(self: Any, *arguments: Any, **further: Any) -> Any:
        found = load(self, *arguments, **further)
        ours = self.checkpoint_engine
        is_whole = further.get("load_optimizer_states", True) and not further.get(
            "load_module_only", False
        )
        if isinstance(ours, PenstockCheckpointEngine) and found[0] is not None and is_whole:
            ours.restore_random_states(os.path.dirname(found[0]))
        return found

    cls.save_checkpoint, cls.load_checkpoint = save_checkpoint, load_checkpoint


def _check(engine: Any) -> None:
    """Refuses what would be saved beside the checkpoint, or not where all ranks see it."""
    if engine.zero_nvme_offload_optimizer():
        raise UnsupportedStateError(
            "the optimizer's state on NVMe is copied by DeepSpeed itself, beside the commit: keep "
            "it in memory (offload_optimizer.device), or save with DeepSpeed's own engine",
            key="optimizer",
        )
    if engine.use_node_local_storage():
        raise UnsupportedStateError(
            "use_node_local_storage: all ranks save one checkpoint, on a file system that they "
            "share",
            key="checkpoint",
        )
