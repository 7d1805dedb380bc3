"""`Saves`: runs the saves of one trainer, one after another, with their small files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock
from penstock.errors import PenstockError, PenstockWarning, RankError, StorageError, storage_errors
from penstock.integrations.private_directory import private_directory
from penstock.integrations.transformers.parts import FILES
from penstock.integrations.transformers.run import lacking, rotate
from penstock.plugin import durable, is_checkpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from penstock.integrations.transformers.settings import Settings
    from penstock.plugin import PacedRun
    from penstock.sealing import Identities


_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")
_FILE_BYTES_MAX = 64 << 20
"""Limits for the name and size of a file stored in a checkpoint; `docs/format.md`, 3.7."""


class Retained(NamedTuple):
    """The checkpoints that a save keeps when it deletes old ones, once it is durable.

    Attributes:
        limit: The number of complete checkpoints to keep; None or 0 for all.
        best: The checkpoint of the best metric, which is kept as well.
    """

    limit: int | None
    best: str | None


class Saves:
    """The saves of one trainer.

    Attributes:
        staging: Directory for the trainer's small files during a save; else None.
        resumed: The checkpoint from which the present training resumed.
        is_over: Whether it has no step to do, as the resumed run had finished all.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._saver = penstock.Saver(options=settings.options, sealing=settings.sealing)
        self._pending: penstock.PendingSave | None = None
        self._last: str | None = None
        self.staging: str | None = None
        self._opened: tuple[str, str] | None = None
        self.resumed: str | None = None
        self.is_over = False
        self._best: str | None = None
        self._run: PacedRun | None = None
        self._step = self._saved_step = -1

    @contextlib.contextmanager
    def running(self, resumed: str | None, directory: str) -> Iterator[None]:
        """A context for a training: at its end, all saves are durable.

        Args:
            resumed: The checkpoint from which it resumes.
            directory: The directory of its checkpoints.
        """
        with self._recorded(directory):
            yield from self._running(resumed)

    @contextlib.contextmanager
    def _recorded(self, directory: str) -> Iterator[None]:
        """Keeps the history of the saves, if they are made when they are due."""
        if self._settings.save_every is None:
            yield
            return
        run = self._run = self._settings.run_in(os.path.abspath(directory))
        self._saver.record(run)
        self._step = self._saved_step = -1
        error: BaseException | None = None
        try:
            yield
        except BaseException as failed:
            error = failed
            raise
        finally:
            self._saver.record(None)
            self._run = None
            run.close(error)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether to save after a step; once for each step, also if asked again.

        Args:
            step: The step.
            is_last: Whether it is the last of the training, after which a run with ``save_every``
                always saves.
        """
        if self._run is None:
            return False
        is_due = False
        if step != self._step:
            self._step = step
            is_saving = self._pending is not None and not self._pending.done()
            is_due = self._run.due(step, is_saving=is_saving)
        return is_due or (is_last and step != self._saved_step)

    def loaded(self, step: int | None, seconds: float) -> None:
        """Notes a load, and takes over the pace of the run before; all ranks call it.

        Args:
            step: The step that was loaded; None if its checkpoint has none.
            seconds: Time of the load.
        """
        if self._run is not None:
            self._run.resumed(step)
            self._run.restored(step, seconds)

    def _running(self, resumed: str | None) -> Iterator[None]:
        self.resumed = self._last = resumed
        self._best = None
        self.is_over = False
        try:
            yield
        except BaseException as error:
            # The error that ended training must reach its caller.
            try:
                self._saver.close()
            except PenstockError as failed:
                error.add_note(f"and a save in the background failed: {failed}")
            raise
        finally:
            self.resumed = None
        self.wait()
        self._saver.close()

    @contextlib.contextmanager
    def staged(self) -> Iterator[str]:
        """A directory in which a trainer writes the small files of a checkpoint."""
        is_sealed = self._settings.sealing is not None
        with private_directory(is_sealed=is_sealed) as directory:
            self.staging = directory
            try:
                yield directory
            finally:
                self.staging = None

    @contextlib.contextmanager
    def opened(self, path: str | None) -> Iterator[str | None]:
        """A directory with the small files of a checkpoint: its own, or one in memory if sealed.

        Args:
            path: The checkpoint; None for none.
        """
        keys = self._settings.keys.identities
        is_ours = path is not None and is_checkpoint(path)
        if path is None or not is_ours or FILES not in _note(path, keys):
            yield path
            return
        # The first rank has them.
        loaded = penstock.load(path, keys=f"{FILES}*", rank=0, identities=keys)
        with private_directory(is_sealed=True) as directory:
            where = os.path.join(directory, os.path.basename(os.path.normpath(path)))
            for name, content in loaded[FILES].items():
                file = Path(where, name)
                if not file.resolve().is_relative_to(Path(where).resolve()):
                    raise AssertionError(f"{name!r} lies outside of its checkpoint")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            self._opened = (where, path)
            try:
                yield where
            finally:
                self._opened = None

    def stored(self, path: str) -> str:
        """The checkpoint that a path stands for, which may be the directory of `opened`."""
        return self._opened[1] if self._opened is not None and path == self._opened[0] else path

    def covers(self, path: str) -> bool:
        """Whether a path is the checkpoint saved last, whose save may still be running.

        Before the first save, it is the checkpoint that the run resumed from; after a save that
        failed, none.
        """
        return self._last is not None and os.path.abspath(path) == os.path.abspath(self._last)

    def best_of(self, path: str | None) -> str | None:
        """The best checkpoint, if it is complete; else the last complete one given here."""
        if path is not None and lacking(path) is None:
            self._best = path
        return self._best

    def save(
        self,
        path: str,
        training: penstock.Training,
        files: dict[str, bytes],
        *,
        step: int,
        retained: Retained,
        is_main: bool,
        at_once: bool,
    ) -> bool:
        """Saves a checkpoint, and deletes those beyond the limit.

        Args:
            path: Its directory.
            training: Tensors, random states and plain values.
            files: Small files to store with it, by relative name.
            step: The step.
            retained: The checkpoints to keep.
            is_main: Whether this rank deletes.
            at_once: Whether it is durable on return, whatever the settings say.

        Returns:
            Whether it is saved, or being saved.
        """
        settings = self._settings
        self._saved_step = step
        if settings.on_error == "warn":
            self.wait()

        # Absolute, as the working directory may change later.
        path = os.path.abspath(path)
        kept = [os.path.realpath(one) for one in (retained.best, self._best) if one is not None]

        def after() -> None:
            best = [one for one in kept if lacking(one) is None]
            rotate(os.path.dirname(path), step, retained.limit, set(best[:1]))

        saved = [name for name in training.state_dict() if name != FILES]
        note = {"parts": saved, "raw": self._pickled(saved)}
        further: dict[str, Any] = {
            "step": step,
            "metadata": {"trainer": note},
            # True only if there is one: otherwise small files are in place before the manifest.
            "overwrite": is_checkpoint(path) or self.covers(path),
        }
        if settings.sealing is not None:
            note[FILES] = sorted(files)
            setattr(training, FILES, files)
        else:
            # Lets `from_pretrained` load the directory.
            further["groups"] = {"model": ""} if "model" in saved else None
            carried = {name: text for name, text in files.items() if _is_carried(name, text)}
            further["files"] = carried
            training = _Placing(training, files.items() - carried.items(), path)
        try:
            if settings.background and not at_once:
                self._pending = self._saver.save_async(
                    path, training, lazy=settings.lazy, after=after, **further
                )
            else:
                self._saver.save(path, training, **further)
                if is_main:
                    after()
        except (StorageError, RankError) as error:
            self._raise_or_warn(error)
            return False
        self._last = path
        return True

    def wait(self) -> None:
        """Waits for the save in progress."""
        try:
            self._saver.wait()
        except (StorageError, RankError) as error:
            self._raise_or_warn(error)

    def _raise_or_warn(self, error: PenstockError) -> None:
        """Raises an error of the storage, or warns of it."""
        self._last = None
        if self._settings.on_error == "raise":
            raise error
        warnings.warn(
            f"training goes on without this checkpoint: {error}", PenstockWarning, stacklevel=4
        )

    def _pickled(self, saved: Collection[str]) -> list[str]:
        """The parts stored as pickled bytes."""
        return [name for name in self._settings.pickled if name in saved]


def _note(path: str, keys: Identities | None) -> dict[str, Any]:
    """The note that the plug-in has saved with a checkpoint."""
    note: dict[str, Any] = penstock.inspect(path, identities=keys).metadata.get("trainer", {})
    return note


def files_in(directory: str) -> dict[str, bytes]:
    """The files that a trainer has put into a checkpoint, by relative name.

    Empty files of weights are left out: the weights are saved as tensors.
    """
    paths = [path for path in sorted(Path(directory).rglob("*")) if path.is_file()]
    read = {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    return {name: content for name, content in read.items() if not _is_empty(name, content)}


def _is_empty(name: str, content: bytes) -> bool:
    """Whether it is a file of weights without tensors."""
    if name == "pytorch_model.bin":
        # With save_safetensors=False, before transformers 5.
        return True
    if not name.endswith(".safetensors"):
        return False
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return not header.keys() - {"__metadata__"}


def _is_carried(name: str, content: bytes) -> bool:
    """Whether a file can be stored in the checkpoint: small, with a plain name, no weights."""
    is_small = len(content) <= _FILE_BYTES_MAX
    return bool(_NAME.fullmatch(name)) and not name.endswith(".safetensors") and is_small


class _Placing(penstock.Training):
    """A training, and files that are written directly to its checkpoint's directory.

    These are PEFT adapters, and files of derived classes in subdirectories. They are durable before
    the commit, and written as part of the save, so that errors reach the other ranks.
    """

    def __init__(
        self, training: penstock.Training, files: Collection[tuple[str, bytes]], path: str
    ) -> None:
        self.__dict__.update(training.__dict__, _files=files, _path=path)

    def state_dict(self) -> dict[str, Any]:
        for name, content in self._files:
            where = os.path.join(self._path, name)
            with storage_errors("write", where, "; free space, or save elsewhere"):
                os.makedirs(os.path.dirname(where), exist_ok=True)
                durable.replace(where, content)
                durable.sync(os.path.dirname(os.path.dirname(where)))
        return super().state_dict()
