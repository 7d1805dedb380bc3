"""`PenstockIO`: what Lightning saves and loads through."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.plugins import CheckpointIO

from penstock import Saver
from penstock.checkpoint.state.check import check_storable
from penstock.errors import PenstockError, PenstockWarning, UnsupportedStateError
from penstock.integrations import raw
from penstock.integrations.lightning import directories, fitting, loading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.checkpoint.saving.groups import Files
    from penstock.checkpoint.saving.pending import PendingSave
    from penstock.options import Options

_REQUEUED = "hpc_ckpt"
"""How checkpoints are called after which a job is queued again at once."""

_alive: weakref.WeakSet[PenstockIO] = weakref.WeakSet()
"""Those that may have a save under way."""

_SHARDED = ("state_dict", "optimizer_states")
"""What of a checkpoint is spread over ranks, where anything is."""


class PenstockIO(CheckpointIO):
    """Has Lightning's Trainer, and Fabric, save into Penstock checkpoints.

    ``Trainer(plugins=[PenstockIO()])`` is all there is to do. A checkpoint is a directory of the
    name that the file would have had, such as ``last.ckpt``. Files that Lightning wrote before load
    as they always did.

    What it asks to be removed is deleted once the checkpoint after it is complete and durable.

    Args:
        async_save: Save in the background: training waits for a copy in memory only. Saves that
            cannot be waited for later stay as they are: those of a job that Slurm queues again, and
            those outside of a run.
        raw: Names of values as `penstock.inspect` shows them, or patterns of `fnmatch` over names,
            that may be stored as a pickle where they cannot be stored otherwise, such as
            ``"hyper_parameters"``.
        trust: Whether to load such values, which can run any code.
        if_failed: What to do when a save fails: ``"raise"`` its error, which ends the training, or
            ``"warn"`` and go on. The checkpoints that were there stay.
        options: How bytes move; None for ``penstock.Options()``.
        groups: Tensors that readers of models are to find, such as ``{"state_dict.model": ""}``;
            see `penstock.save`.
        files: Small files that lie beside the shards, such as the directory of ``config.json``;
            see `penstock.save`.

    Raises:
        MissingDependencyError: Lightning is newer than was tried, and a state of a trial run did
            not come back.
        ValueError: An argument is out of range.

    Example:
        >>> import tempfile, torch
        >>> from lightning.fabric import Fabric
        >>> from penstock.integrations.lightning import PenstockIO
        >>> fabric = Fabric(accelerator="cpu", devices=1, plugins=[PenstockIO()])
        >>> path = tempfile.mkdtemp() + "/step-10.ckpt"
        >>> fabric.save(path, {"w": torch.ones(3), "step": 10})
        >>> fabric.load(path)["step"]
        10
    """

    def __init__(
        self,
        *,
        async_save: bool = False,
        raw: str | Sequence[str] = (),
        trust: bool = False,
        if_failed: Literal["raise", "warn"] = "raise",
        options: Options | None = None,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> None:
        if if_failed not in ("raise", "warn"):
            raise ValueError(f"if_failed={if_failed!r}: must be one of 'raise', 'warn'")
        fitting.try_out(PenstockIO)
        self.async_save = async_save
        self.raw = (raw,) if isinstance(raw, str) else tuple(raw)
        self.trust = trust
        self.if_failed = if_failed
        self.options = options
        self.groups = groups
        self.files = files
        self.is_running = True
        """Whether somebody comes back to hear what became of a save in the background."""
        # Lightning asks one rank to save; a strategy of ours asks all of them.
        self._saver = self._alone = Saver(options=options, no_dist=True)
        self._together = Saver(options=options)
        self._pending: PendingSave | None = None
        self._has_failed = False
        self._newest: str | None = None
        # A handler of a signal saves, in the middle of anything.
        self._lock = threading.RLock()
        self._removals: dict[str, None] = {}
        self._links: dict[str, str] = {}
        self._troubles: list[str] = []
        _alive.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Trainers are copied and go to other processes. A save under way stays where it is.
        names = ("async_save", "raw", "trust", "if_failed", "options", "groups", "files")
        return _made, ({name: getattr(self, name) for name in names},)

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Refuses what a save could not store; nothing of it is copied.

        Args:
            checkpoint: What is known of a checkpoint before there is one.

        Raises:
            UnsupportedStateError: A value cannot be stored; the message names it, and the choice.
        """
        state = checkpoint
        if self.raw:
            state = raw.packed(checkpoint, "", self.raw, is_last_resort=True)
        try:
            check_storable(state)
        except UnsupportedStateError as error:
            raise _choice(error, state, self.raw) from error

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Saves a checkpoint; one that is there stays loadable until the new one is durable.

        Raises:
            TypeError: There are ``storage_options``.
            UnsupportedStateError: A value cannot be stored; the message names it, and the choice.
            PenstockError: The error of the last save in the background, or of this one.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options are none of PenstockIO's: how bytes move is said by "
                "PenstockIO(options=penstock.Options(…))"
            )
        name = directories.absolute(path)
        # What waits for the last save may make a link of the name.
        self.wait()
        self.save_as(checkpoint, directories.place_for(name), name, is_together=False)

    def save_as(
        self, checkpoint: dict[str, Any], where: str, path: str, *, is_together: bool
    ) -> None:
        """Saves to one place what is then to be called another.

        Args:
            checkpoint: What to save.
            where: Where to, see `directories.place_for`.
            path: The name at the end.
            is_together: Whether all ranks save, or this one alone.
        """
        self.wait()
        with self._lock:
            # It is asked for again.
            self._removals.pop(path, None)
            self._links.pop(path, None)
        with self._told(path):
            self._save(checkpoint, where, path, is_together=is_together)

    def _save(
        self, checkpoint: dict[str, Any], where: str, path: str, *, is_together: bool
    ) -> None:
        self._saver = self._together if is_together else self._alone
        state = checkpoint
        if self.raw:
            state = raw.packed(checkpoint, "", self.raw, is_last_resort=True)
        step = checkpoint.get("global_step")
        step = step if type(step) is int and step >= 0 else None
        how: dict[str, Any] = {
            "step": step,
            "metadata": {"by": "lightning", "resumes": "optimizer_states" in checkpoint},
            "overwrite": True,
            "groups": self.groups,
            "files": self.files,
        }
        try:
            if self.async_save and self.is_running and _REQUEUED not in os.path.basename(path):
                self._pending = self._saver.save_async(
                    where, state, after=lambda: self._saved(where, path), **how
                )
                return
            self._saver.save(where, state, **how)
        except UnsupportedStateError as error:
            rest = {key: state[key] for key in state if not (is_together and key in _SHARDED)}
            raise _choice(error, rest, self.raw) from error
        if not is_together or self._is_first():
            self._saved(where, path)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint of Penstock's, or a file of `torch.save`, as PyTorch does.

        Args:
            path: The directory or file.
            map_location: Where to put tensors, as for `torch.load`.
            weights_only: As for `torch.load`. Of a directory nothing is unpickled unless it is
                False, or the plug-in has ``trust=True``.

        Raises:
            CheckpointNotFoundError: There is nothing at the path.
            IncompleteCheckpointError: The save there never finished.
            CorruptCheckpointError: It is damaged.
            UnsupportedStateError: It has a pickled value, and is not trusted.
        """
        self.wait()
        return loading.read(path, map_location, weights_only, trust=self.trust)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint, once the last save is durable; if it fails, after the next one."""
        with self._lock:
            self._removals[directories.absolute(path)] = None
        self._settle_if_saved()

    def link_checkpoint(self, target: str, path: str) -> None:
        """Has a link lead to a checkpoint, once the last save is durable."""
        with self._lock:
            self._links[directories.absolute(path)] = directories.absolute(target)
        self._settle_if_saved()

    def wait(self) -> None:
        """Waits for the save under way, if there is one.

        Raises:
            PenstockError: Its error, unless ``if_failed`` is ``"warn"``.
        """
        pending = self._pending
        if pending is not None:
            try:
                with self._told(pending.path):
                    self._saver.wait()
            finally:
                # After a Ctrl-C it is still under way.
                if pending.done():
                    self._pending = None
            self._settle_if_saved()
        troubles, self._troubles = self._troubles, []
        for trouble in troubles:
            warnings.warn(trouble, PenstockWarning, stacklevel=1)

    def teardown(self) -> None:
        """Waits for the save under way and gives back the memory that saves are staged in.

        Raises:
            PenstockError: Its error, unless ``if_failed`` is ``"warn"``.
        """
        try:
            self.wait()
        finally:
            self.is_running = False
            self._alone.close()
            self._together.close()

    @contextmanager
    def _told(self, path: str) -> Iterator[None]:
        """Has the error of a save told as the user wants."""
        self._has_failed = True
        try:
            yield
        except UnsupportedStateError:
            # It would come each time.
            raise
        except PenstockError as error:
            if self.if_failed == "raise":
                raise
            warnings.warn(
                f"{path} is not saved, training goes on: {error}", PenstockWarning, stacklevel=1
            )
            return
        self._has_failed = False

    def _is_first(self) -> bool:
        import torch.distributed as dist

        return not dist.is_initialized() or dist.get_rank() == 0

    def _saved(self, where: str, path: str) -> None:
        """What comes after a checkpoint is complete and durable; in the background nobody hears."""
        try:
            directories.rename_onto(where, path)
            self._newest = path
            self._settle()
        except OSError as error:
            self._troubles.append(
                f"{where} is saved, and {path} could not be made to lead to it: {error}"
            )

    def _settle_if_saved(self) -> None:
        pending = self._pending
        if self._has_failed or (pending is not None and not (pending.done() and pending.report)):
            return
        self._settle()

    def _settle(self) -> None:
        """Does what had to wait for a save."""
        with self._lock:
            links, self._links = self._links, {}
            removals, self._removals = self._removals, {}
        # First the links: else one could lead to what is removed.
        for path, target in links.items():
            self._attempt(f"{path} could not be linked", directories.link, target, path)
        for path in removals:
            what = f"{path} could not be removed"
            if not self._attempt(what, directories.remove, path, self._newest):
                with self._lock:
                    # Somebody may read it, and be done after the next save.
                    self._removals[path] = None

    def _attempt(self, what: str, call: Any, *arguments: Any) -> bool:
        try:
            call(*arguments)
        except (OSError, PenstockError) as error:
            self._troubles.append(f"{what}, the checkpoints are complete: {error}")
            return False
        return True


def _made(settings: dict[str, Any]) -> PenstockIO:
    return PenstockIO(**settings)


def _choice(
    error: UnsupportedStateError, state: dict[str, Any], patterns: Sequence[str]
) -> UnsupportedStateError:
    """The error of a save, with the choice that there is, for all of what would be refused.

    Args:
        error: What the save raised.
        state: Where to look for what else would be refused.
        patterns: What the user has chosen already.
    """
    refused = [key for key, value in state.items() if not raw.is_storable(value)]
    refused = refused or [error.key.partition(".")[0]]
    return UnsupportedStateError(
        f"{error}; or store {', '.join(refused)} raw, as a pickle that is loaded with trust=True "
        f"only: PenstockIO(raw={[*patterns, *refused]!r})",
        key=error.key,
    )


def wait_for_all() -> None:
    """Waits for what any plug-in of this process has under way.

    Raises:
        PenstockError: One failed.
    """
    for io in list(_alive):
        io.wait()
