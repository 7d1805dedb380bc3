"""`PenstockCheckpointEngine`: receives the files of a tag from DeepSpeed, and saves them."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import penstock
from penstock import Saver, Training
from penstock.errors import (
    PenstockError,
    PenstockWarning,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)
from penstock.integrations import pickling
from penstock.integrations.deepspeed import tags, values
from penstock.plugin import LiveState, is_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock import PendingSave
    from penstock.options import Options
    from penstock.plugin import SealingKeys


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The arguments of `enable`."""

    background: bool
    lazy: bool
    rng: bool
    pickled: tuple[str, ...]
    trust: bool
    options: Options | None
    keys: SealingKeys = tags.NO_KEYS


class PenstockCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Receives each file of a tag from DeepSpeed, and saves all of them in one commit."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self.name = "PenstockCheckpointEngine"
        self._settings = settings
        self._saver = Saver(options=settings.options, **settings.keys.closing)
        self._theirs = TorchCheckpointEngine()
        self._save_dir, self._tag = "", ""
        self._is_open = False
        self._files: Files | None = None
        self._pending: PendingSave | None = None
        # The path and the tag of a `latest` that could not be written yet.
        self._behind: tuple[str, str] | None = None
        self.loaded = ""
        """The directory of the last load, for messages."""

    # Called by DeepSpeed.

    def create(self, info: Any) -> None:
        """Learns which tag will be saved; older versions of DeepSpeed pass only its name."""
        self._tag = str(getattr(info, "tag", info))
        if self._is_open:
            settings = self._settings
            self._files = Files(self._directory, pickled=settings.pickled, rng=settings.rng)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes no directory of a tag; `finish` does, where a failure reaches the other ranks."""
        if not self._is_open:
            super().makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Keeps a file of the tag for `finish`; writes files outside of a tag at once."""
        if self._files is None:
            what = "a file that DeepSpeed writes outside of a tag stays clear"
            self._settings.keys.refuse_sealing(path, what)
            what = "a file that DeepSpeed writes outside of a tag is not signed"
            self._settings.keys.refuse_signing(path, what)
            self._theirs.save(state_dict, path)
        else:
            self._files.add(path, state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads a file of a tag, of Penstock's or DeepSpeed's."""
        self.wait()
        self.loaded = os.path.dirname(os.path.abspath(path))
        settings = self._settings
        if not tags.is_stub(path):
            settings.keys.refuse_clear(path, "a file of DeepSpeed's own")
            return self._theirs.load(path, map_location)
        # Other values are functions that leave everything on the host.
        device = None if callable(map_location) else map_location
        return tags.read_file(
            path,
            trust=settings.trust,
            options=settings.options,
            device=device,
            keys=settings.keys,
        )

    def commit(self, info: Any) -> bool:
        """Does nothing: `finish` commits a tag, once it is known that no more files follow."""
        return True

    def is_decoupled(self) -> bool:
        """Whether saves run in the background; then DeepSpeed's `destroy` calls `cleanup`."""
        return self._settings.background

    def preserves_storage_sharing(self) -> bool:
        """Whether views must be cloned, as `torch.save` stores the whole storage of a view; no."""
        return False

    def cleanup(self) -> None:
        """Waits for the save in progress.

        Raises:
            PenstockError: It failed.
        """
        self._saver.close()
        if self._behind is not None:
            self._move_latest(*self._behind)

    def plain(self) -> PenstockCheckpointEngine:
        """Another engine, which saves in the foreground and has no keys.

        A job that seals need not have identities to load with.
        """
        plain = replace(self._settings, background=False, lazy=False, keys=tags.NO_KEYS)
        return PenstockCheckpointEngine(plain)

    # Called by the methods that replace those of DeepSpeed's engine.

    def begin(self, save_dir: str | os.PathLike[str]) -> None:
        """Begins a tag in this directory: files saved from now on belong to it."""
        self._save_dir = os.path.abspath(save_dir)
        self._is_open = True

    def end(self) -> Files | None:
        """Ends the tag; returns its files."""
        files, self._files, self._is_open = self._files, None, False
        return files

    @property
    def is_open(self) -> bool:
        """Whether a tag is begun and not ended."""
        return self._is_open

    def wait(self) -> None:
        """Waits for the save in progress.

        Raises:
            PenstockError: It failed, and its error was not raised before.
        """
        self._saver.wait()

    def wait_on_all_ranks(self) -> None:
        """Waits for the save in progress on all ranks, so that all then read the same ``latest``.

        Raises:
            PenstockError: It failed, and its error was not raised before.
        """
        try:
            self.wait()
        finally:
            if self._settings.background:
                # The first rank writes `latest`, and others may finish before it.
                comm.barrier()

    def stage(self) -> None:
        """Copies tensors that a lazy save has not copied yet, as they are about to change."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.stage()

    def finish(self, step: int, *, moves_latest: bool) -> None:
        """Saves all files of all ranks in one commit, then writes ``latest``."""
        files, settings, tag = self.end(), self._settings, self._tag
        tags.check_ours(self._directory)
        latest = os.path.join(self._save_dir, "latest")
        further: dict[str, Any] = {
            "step": step,
            "metadata": {"by": "deepspeed", "pickled": list(settings.pickled)},
            "overwrite": True,
        }
        try:
            if settings.background:
                after = functools.partial(self._move_latest_behind, latest, tag)
                self._pending = self._saver.save_async(
                    self._directory,
                    files,
                    lazy=settings.lazy,
                    after=after if moves_latest else None,
                    **further,
                )
                return
            self._saver.save(self._directory, files, **further)
        except UnsupportedStateError as error:
            key = error.key.removeprefix("files.")
            raise UnsupportedStateError(
                f"{error}; or store it as pickle: enable(pickled=[{key!r}])", key=key
            ) from error
        if moves_latest:
            self._move_latest_on_all_ranks(latest, tag)

    def _move_latest(self, path: str, tag: str) -> None:
        self._behind = (path, tag)
        tags.write(path, tag.encode())
        self._behind = None

    def _move_latest_on_all_ranks(self, path: str, tag: str) -> None:
        """Writes ``latest`` on the first rank; raises its error on all ranks."""
        failed: list[StorageError | None] = [None]
        if comm.get_rank() == 0:
            try:
                self._move_latest(path, tag)
            except StorageError as error:
                failed = [error]
        comm.broadcast_object_list(failed, src=0)
        if failed[0] is not None:
            raise failed[0]

    def _move_latest_behind(self, path: str, tag: str) -> None:
        """Writes ``latest`` in the background; warns on failure, and `cleanup` tries again."""
        try:
            self._move_latest(path, tag)
        except StorageError as error:
            told = f"tag {tag} is saved, but it is not the latest: {error}"
            warnings.warn(told, PenstockWarning, stacklevel=2)

    def restore_random_states(self, path: str) -> None:
        """Restores the random states of this rank.

        Raises:
            StateMismatchError: They were not saved.
        """
        if not self._settings.rng or not is_checkpoint(path):
            return
        try:
            state = penstock.load(
                path,
                keys="rng.*",
                options=self._settings.options,
                **self._settings.keys.opening,
            )
        except StateMismatchError as error:
            raise StateMismatchError(
                f"{path} was saved without random states: enable(rng=False) restores none",
                key="rng",
                path=path,
            ) from error
        Training().load_state_dict(state)

    @property
    def _directory(self) -> str:
        return os.path.join(self._save_dir, self._tag)


class Files(LiveState):
    """Files received from DeepSpeed, converted when the save flattens the state.

    A save tells all ranks if flattening fails on one. A failure before that would leave the others
    in a barrier of DeepSpeed's. So `state_dict` does everything that can fail.
    """

    def __init__(self, directory: str, *, pickled: Sequence[str], rng: bool) -> None:
        self._directory = directory
        self._pickled = pickled
        self._rng = rng
        self._states: dict[str, Any] = {}

    def add(self, path: str, state: Any) -> None:
        """Adds a file."""
        self._states[os.path.abspath(path)] = state

    def state_dict(self) -> dict[str, Any]:
        """The state; writes a stub for each file."""
        files = {}
        for path, state in self._states.items():
            above, name = os.path.split(path)
            if above != self._directory:
                raise PenstockError(f"{path} lies outside of the tag {self._directory}")
            tags.check_stub(path)
            files[name] = pickling.packed(values.plain(state), name, self._pickled)
            # Not of bytes, which would be taken for the state of a generator, one for each rank.
            files[name][tags.SHARED] = torch.zeros(1)
        tags.make(self._directory)
        for path in self._states:
            tags.put_stub(path)
        return {"files": files, **({"rng": Training().state_dict()["rng"]} if self._rng else {})}

    def _optimizers(self) -> list[Any]:
        return []
