"""`Saves`: runs the saves of one trainer, one after another, with their small files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock
from penstock.errors import PenstockError, PenstockWarning, RankError, StorageError
from penstock.integrations.transformers.run import lacking, rotate
from penstock.plugin import durable, is_checkpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from penstock.integrations.transformers.settings import Settings


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
        self._saver = penstock.Saver(options=settings.options)
        self._last: str | None = None
        self.staging: str | None = None
        self.resumed: str | None = None
        self.is_over = False
        self._best: str | None = None

    @contextlib.contextmanager
    def running(self, resumed: str | None) -> Iterator[None]:
        """A context for a training: at its end, all saves are durable.

        Args:
            resumed: The checkpoint from which it resumes.

        Raises:
            PenstockError: The error of the last save, if it was not raised before.
        """
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
        with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
            self.staging = directory
            try:
                yield directory
            finally:
                self.staging = None

    def covers(self, path: str) -> bool:
        """Whether a checkpoint is the last one saved, or the one resumed from.

        Its save may be in progress.
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

        Raises:
            PenstockError: It failed, or the one before did and its error was not raised before; the
                settings may turn errors of the storage into warnings.
        """
        settings = self._settings
        if settings.on_error == "warn":
            self.wait()

        # Absolute, as the working directory may change later.
        path = os.path.abspath(path)
        kept = [os.path.realpath(one) for one in (retained.best, self._best) if one is not None]

        def after() -> None:
            best = [one for one in kept if lacking(one) is None]
            rotate(os.path.dirname(path), step, retained.limit, set(best[:1]))

        saved = list(training.state_dict())
        further: dict[str, Any] = {
            "step": step,
            "metadata": {"trainer": {"parts": saved, "raw": self._pickled(saved)}},
            # True only if there is one: otherwise small files are in place before the manifest.
            "overwrite": is_checkpoint(path) or self.covers(path),
            # Lets `from_pretrained` load the directory.
            "groups": {"model": ""} if "model" in saved else None,
            "files": {name: text for name, text in files.items() if _is_carried(name, text)},
        }
        training = _Placing(training, files.items() - further["files"].items(), path)
        try:
            if settings.background and not at_once:
                self._saver.save_async(path, training, lazy=settings.lazy, after=after, **further)
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
        """Waits for the save in progress.

        Raises:
            PenstockError: It failed, and its error was not raised before; the settings may turn
                errors of the storage into warnings.
        """
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
            try:
                os.makedirs(os.path.dirname(where), exist_ok=True)
                durable.replace(where, content)
                durable.sync(os.path.dirname(os.path.dirname(where)))
            except OSError as error:
                raise StorageError(
                    f"cannot write {where}: {error.strerror}; free space, or save elsewhere",
                    path=where,
                    errno=error.errno,
                ) from error
        return super().state_dict()
