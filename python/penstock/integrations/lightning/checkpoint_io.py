"""`PenstockIO`: makes Lightning save and load through Penstock."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.plugins import CheckpointIO

from penstock import Saver
from penstock.errors import PenstockError, PenstockWarning, UnsupportedStateError
from penstock.integrations import pickling
from penstock.integrations.lightning import directories, fitting, loading
from penstock.integrations.lightning.enable import enable
from penstock.plugin import SealingKeys, check_storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock import PendingSave
    from penstock.options import Options
    from penstock.plugin import Files, PacedRun
    from penstock.sealing import Identities, Key, Sealing
    from penstock.signing import SignatureKey, Signers, SigningKeys

_REQUEUED = "hpc_ckpt"
"""Prefix of checkpoints after which a job is queued again at once."""

_alive: weakref.WeakSet[PenstockIO] = weakref.WeakSet()
"""Plug-ins that may have a save in progress."""

_SHARDED = ("state_dict", "optimizer_states")
"""Entries of a checkpoint that are sharded over ranks, if anything is."""


class PenstockIO(CheckpointIO):
    """Makes Lightning's Trainer, and Fabric, save into Penstock checkpoints.

    Use it as ``Trainer(plugins=[PenstockIO()])``, without further changes. A checkpoint is a
    directory named like Lightning's file, such as ``last.ckpt``. Files that Lightning wrote are
    loaded as before.

    Checkpoints that Lightning removes are deleted once the next checkpoint is complete and durable.

    Args:
        background: Save in the background: training waits only for a copy in memory. Saves that
            nobody could wait for stay in the foreground: those of a job that Slurm queues again,
            and those outside of a run.
        pickled: Names of values, as `penstock.inspect` shows them, or patterns of `fnmatch` for
            them, that are pickled if they cannot be stored otherwise, such as
            ``"hyper_parameters"``.
        trust: Whether to load such values, which can run any code.
        on_error: Whether a failed save raises its error (``"raise"``), which ends the training, or
            warns and goes on (``"warn"``). Earlier checkpoints stay.
        options: Settings of the I/O; None for ``penstock.Options()``.
        groups: Models to store so that other programs find them, such as ``{"state_dict.model":
            ""}``; see `penstock.save`.
        files: Small files to store beside the shards, such as the directory of ``config.json``; see
            `penstock.save`.
        sealing: For whom checkpoints are sealed; see `penstock.save`.
        identities: Keys that open sealed checkpoints; see `penstock.load`. With either, loads
            refuse clear checkpoints, also files of Lightning's own.
        sign: Private keys that sign checkpoints while they are saved; see `penstock.save`.
        signed_by: Public keys of which one must have signed a checkpoint; see `penstock.load`.
            Files of Lightning's own are refused then.

    Raises:
        CannotSealError: ``groups`` or ``files`` are given with ``sealing``, and would stay clear.
        MissingDependencyError: Lightning is newer than the versions tested, and a trial run did not
            restore its state.
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
        background: bool = False,
        pickled: str | Sequence[str] = (),
        trust: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
        options: Options | None = None,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
        sealing: Sealing | None = None,
        identities: Identities | Key | Iterable[Key] | None = None,
        sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
        signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
    ) -> None:
        self.keys = SealingKeys.of(sealing, identities, sign=sign, signed_by=signed_by)
        if groups or files:
            self.keys.refuse_sealing("PenstockIO", "groups= and files= stay clear, for readers")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={on_error!r}: must be one of 'raise', 'warn'")
        enable()
        fitting.try_out(PenstockIO)
        self.background = background
        self.pickled = (pickled,) if isinstance(pickled, str) else tuple(pickled)
        self.trust = trust
        self.on_error = on_error
        self.options = options
        self.groups = groups
        self.files = files
        self.is_running = True
        """Whether a later call will raise the error of a background save."""
        self.load_seconds: float | None = None
        """Time of the last load; None before the first."""
        # Lightning lets one rank save; Penstock's strategies let all of them.
        self._saver = self._alone = Saver(options=options, no_dist=True, **self.keys.closing)
        self._together = Saver(options=options, **self.keys.closing)
        self._pending: PendingSave | None = None
        self._has_failed = False
        self._newest: str | None = None
        # Reentrant, as a signal handler saves at any time.
        self._lock = threading.RLock()
        self._removals: dict[str, None] = {}
        self._links: dict[str, str] = {}
        self._troubles: list[str] = []
        _alive.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Trainers are copied and sent to other processes. A save in progress stays here.
        names = ("background", "pickled", "trust", "on_error", "options", "groups", "files")
        settings = {name: getattr(self, name) for name in names}
        # Keys can be copied, and refuse to be pickled.
        return _made, (settings | self.keys.opening | self.keys.closing,)

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Raises if a checkpoint could not be stored; copies nothing.

        Args:
            checkpoint: The parts of a checkpoint that are known before the first save.

        Raises:
            UnsupportedStateError: A value cannot be stored; the message names it and the remedy.
        """
        state = checkpoint
        if self.pickled:
            state = pickling.packed(checkpoint, "", self.pickled, is_last_resort=True)
        try:
            check_storable(state)
        except UnsupportedStateError as error:
            raise _choice(error, state, self.pickled) from error

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Saves a checkpoint; an old one of that name can be loaded until the new one is durable.

        Raises:
            TypeError: ``storage_options`` are given.
            UnsupportedStateError: A value cannot be stored; the message names it and the remedy.
            PenstockError: The error of the last save in the background, or of this one.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options are none of PenstockIO's: how bytes move is said by "
                "PenstockIO(options=penstock.Options(…))"
            )
        name = directories.absolute(path)
        # The actions that wait for the last save may make a link of that name.
        self.wait()
        self.save_as(checkpoint, directories.place_for(name), name, is_together=False)

    def save_as(
        self, checkpoint: dict[str, Any], where: str, path: str, *, is_together: bool
    ) -> None:
        """Saves to one path, and then renames the checkpoint to another.

        Args:
            checkpoint: The checkpoint to save.
            where: The first path, see `directories.place_for`.
            path: The final path.
            is_together: Whether all ranks save, or this one alone.
        """
        self.wait()
        with self._lock:
            # A new checkpoint of that name must not be removed or replaced by a link.
            self._removals.pop(path, None)
            self._links.pop(path, None)
        with self._handling_failure(path):
            self._save(checkpoint, where, path, is_together=is_together)

    def _save(
        self, checkpoint: dict[str, Any], where: str, path: str, *, is_together: bool
    ) -> None:
        self._saver = self._together if is_together else self._alone
        state = checkpoint
        if self.pickled:
            state = pickling.packed(checkpoint, "", self.pickled, is_last_resort=True)
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
            if self.background and self.is_running and _REQUEUED not in os.path.basename(path):
                self._pending = self._saver.save_async(
                    where, state, after=lambda: self._saved(where, path), **how
                )
                return
            self._saver.save(where, state, **how)
        except UnsupportedStateError as error:
            rest = {key: state[key] for key in state if not (is_together and key in _SHARDED)}
            raise _choice(error, rest, self.pickled) from error
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
            weights_only: As for `torch.load`. Values in a directory are unpickled only if it is
                False, or if the plug-in has ``trust=True``.

        Raises:
            CheckpointNotFoundError: There is nothing at the path.
            IncompleteCheckpointError: The save there never finished.
            CorruptCheckpointError: It is damaged.
            TamperedError: Somebody without the key has changed a sealed checkpoint.
            SealedError: It is sealed, and there are no identities.
            NotSealedError: It is clear, and the plug-in has keys.
            UnsupportedStateError: It has a pickled value, and is not trusted.
        """
        self.wait()
        began = time.perf_counter()
        checkpoint = loading.read(
            path, map_location, weights_only, trust=self.trust, keys=self.keys
        )
        self.load_seconds = time.perf_counter() - began
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint once the last save is durable; if that fails, after the next one."""
        with self._lock:
            self._removals[directories.absolute(path)] = None
        self._finish_if_saved()

    def link_checkpoint(self, target: str, path: str) -> None:
        """Makes a link to a checkpoint, once the last save is durable."""
        with self._lock:
            self._links[directories.absolute(path)] = directories.absolute(target)
        self._finish_if_saved()

    def wait(self) -> None:
        """Waits for the save in progress, if there is one.

        Raises:
            PenstockError: It failed, unless ``on_error`` is ``"warn"``.
        """
        pending = self._pending
        if pending is not None:
            try:
                with self._handling_failure(pending.path):
                    self._saver.wait()
            finally:
                # After an interrupt it may still be in progress.
                if pending.done():
                    self._pending = None
            self._finish_if_saved()
        troubles, self._troubles = self._troubles, []
        for trouble in troubles:
            warnings.warn(trouble, PenstockWarning, stacklevel=1)

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress on this rank."""
        return self._pending is not None and not self._pending.done()

    def record(self, run: PacedRun | None) -> None:
        """Records the times of later saves in a run; None for no record."""
        self._alone.record(run)
        self._together.record(run)

    def teardown(self) -> None:
        """Waits for the save in progress and releases the staging memory.

        Raises:
            PenstockError: It failed, unless ``on_error`` is ``"warn"``.
        """
        try:
            self.wait()
        finally:
            self.is_running = False
            self._alone.close()
            self._together.close()

    @contextmanager
    def _handling_failure(self, path: str) -> Iterator[None]:
        """Raises or warns of a save's error, as ``on_error`` says."""
        self._has_failed = True
        try:
            yield
        except UnsupportedStateError:
            # Raised always, as each save would fail so.
            raise
        except PenstockError as error:
            if self.on_error == "raise":
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
        """Renames a durable checkpoint and deletes old ones; keeps errors for the next `wait`."""
        try:
            directories.rename_onto(where, path)
            self._newest = path
            self._finish()
        except OSError as error:
            self._troubles.append(
                f"{where} is saved, and {path} could not be made to lead to it: {error}"
            )

    def _finish_if_saved(self) -> None:
        pending = self._pending
        if self._has_failed or (pending is not None and not (pending.done() and pending.report)):
            return
        self._finish()

    def _finish(self) -> None:
        """Makes the links and deletes the checkpoints that waited for a save."""
        with self._lock:
            links, self._links = self._links, {}
            removals, self._removals = self._removals, {}
        # Links first: otherwise one could lead to a deleted checkpoint.
        for path, target in links.items():
            self._attempt(f"{path} could not be linked", directories.link, target, path)
        for path in removals:
            what = f"{path} could not be removed"
            if not self._attempt(what, directories.remove, path, self._newest):
                with self._lock:
                    # Another process may be reading it: try again after the next save.
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
    """The error of a save with a remedy: to pickle all values that would be refused.

    Args:
        error: The error of the save.
        state: The state in which to look for further values.
        patterns: Values that the user has chosen already.
    """
    refused = [key for key, value in state.items() if not pickling.is_storable(value)]
    refused = refused or [error.key.partition(".")[0]]
    return UnsupportedStateError(
        f"{error}; or store {', '.join(refused)} as pickles, which are loaded with trust=True "
        f"only: PenstockIO(pickled={[*patterns, *refused]!r})",
        key=error.key,
    )


def wait_for_all() -> None:
    """Waits for all saves in progress of all plug-ins of this process."""
    for io in list(_alive):
        io.wait()
