"""`StoredSteps`: what a store has, whoever saved it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from penstock import _native
from penstock.checkpoint.loading.dcp_files import drop_mark
from penstock.checkpoint.steps.reader import Reader
from penstock.checkpoint.steps.rows import Mark, Orphan, SetAside, StepInfo
from penstock.checkpoint.steps.scrub import check_scrub, marks, scrub
from penstock.common.option_kinds import Number
from penstock.common.progress import shown
from penstock.common.tracing import call
from penstock.errors import PenstockError, PenstockWarning
from penstock.io.arguments import check_step, to_native

if TYPE_CHECKING:
    from penstock.checkpoint.steps.retention import Retention
    from penstock.common.progress import Progress
    from penstock.options import Options
    from penstock.reports import RetentionReport, ScrubReport

_AGE = Number(0, 1 << 40, "seconds")


class StoredSteps:
    """The steps of a store, as they are: listed, read back, protected, deleted.

    Args:
        root: The store's directory.
        retention: What is kept of them.
        options: How bytes move; None for ``Options()``.
    """

    def __init__(self, root: str, retention: Retention, options: Options | None) -> None:
        self._root = root
        self._retention = retention
        self._options = options
        self._native = _native.Store(root)

    @property
    def root(self) -> str:
        """The store's directory."""
        return self._root

    def path(self, step: int) -> str:
        """The directory of a step, whether it exists or not."""
        return self._reader().path(check_step(step))

    def scan(self) -> list[StepInfo]:
        """Every step by number, whether complete or not.

        Looks for all files of all steps; `steps` and `latest` ask for less.
        """
        return sorted(StepInfo(*entry) for entry in self._native.steps())

    def steps(self) -> list[int]:
        """The complete steps, oldest first.

        Of each, only the manifest is read, which is written last. `scan` looks whether every file
        of every step is there, `verify` what is in them.
        """
        return self._native.committed()

    def latest(self) -> int | None:
        """The newest complete step that is not known to be damaged; None if there is none.

        Known is what `load`, `verify` and `scrub` found and nobody has verified since. A `load`
        without a step does not go by that: it reads the newest complete step, and its damage is
        an error each time, until ``fallback=True`` or a new save has it set aside.
        """
        return self._native.newest_complete()

    def set_aside(self, step: int) -> str:
        """Sets a damaged step aside: renames it within the store, so that it is in nobody's way.

        `save` does so with a damaged step that it is to take the place of, and ``load`` with
        ``fallback=True`` with those that it went back over. What is set aside is no step any more:
        no `load`, `steps` or `sweep` looks at it. With ``keep_last``, each save removes all but
        the last three, and those that are protected.

        Args:
            step: The training step.

        Returns:
            Where it is now: a path for `penstock.explain`, `penstock.salvage` and
            `penstock.verify`.

        Raises:
            CheckpointNotFoundError: There is no such step.
            PenstockError: It is not known to be damaged.
            StorageError: The operating system failed an operation, somebody reads the step, or
                the file system has no locks that all hosts see: there a step stays until it is
                saved again with ``overwrite=True``, or deleted.

        Example:
            >>> import numpy as np, os, penstock, tempfile
            >>> store = penstock.CheckpointStore(tempfile.mkdtemp())
            >>> for step in (10, 20):
            ...     report = store.save(step, {"w": np.full(3, step)})
            >>> shard = penstock.inspect(store.path(20)).files[-1].name
            >>> os.truncate(os.path.join(store.path(20), shard), 5)
            >>> path = store.set_aside(20)
            >>> store.aside() == [(20, path)], store.load()["w"]
            (True, array([10, 10, 10]))
        """
        aside = self._native.set_aside(check_step(step))
        if aside is None:
            raise PenstockError(
                f"{self.path(step)} is not known to be damaged and stays: store.verify({step}) "
                "reads it and remembers what it finds"
            )
        return aside

    def aside(self) -> list[SetAside]:
        """The damaged steps that were set aside, in that order.

        Raises:
            StorageError: The operating system failed an operation.
        """
        return [SetAside(*entry) for entry in self._native.aside()]

    def marks(self) -> dict[int, Mark]:
        """What `load`, `verify` and `scrub` remember of the steps that were read back whole.

        Raises:
            CorruptCheckpointError: What they remember cannot be made out. As long as that is so,
                `keep_last` deletes nothing; the next `verify` or `scrub` mends it.
            StorageError: The operating system failed an operation.
        """
        return marks(self._native)

    def scrub(
        self,
        *,
        bytes_per_second: int | None = None,
        max_age_seconds: float | None = 7 * 86_400,
        progress: bool | Progress = False,
    ) -> ScrubReport:
        """Reads steps back before somebody needs them, and remembers what it found.

        Steps that were never read back come first, newest first, then those that were read back
        longest ago. Every step is remembered as soon as it was read, by `load` and `verify` as
        well: a scrub that is stopped (Ctrl-C) goes on where it was when it is called again.
        Retention keeps the newest good step, and does not count those found damaged.

        Args:
            bytes_per_second: Read no faster than this, so that training does not feel it. Bytes
                come in requests of 1 MiB: slower than that is right on average only.
            max_age_seconds: Leave alone what was read back more recently; 0 reads everything,
                None nothing twice.
            progress: True for a bar on standard error, or a function of bytes done and in all.

        Raises:
            StorageError: The operating system failed an operation; a step that it does not let
                read is in the report instead.
            ValueError: An argument is out of range.

        Example:
            >>> import numpy as np, penstock, tempfile
            >>> store = penstock.CheckpointStore(tempfile.mkdtemp())
            >>> report = store.save(1, {"w": np.ones(3)})
            >>> [(step.step, step.state) for step in store.scrub().steps]
            [(1, 'verified')]
            >>> [(step.step, step.state) for step in store.scrub().steps]
            [(1, 'skipped')]
        """
        check_scrub(bytes_per_second, max_age_seconds)
        with call("stall", "scrub", self._root), shown(progress, "scrubbing") as update:
            return scrub(
                self._native,
                self._root,
                bytes_per_second=bytes_per_second,
                max_age_seconds=max_age_seconds,
                options=to_native(self._options),
                update=update,
            )

    def delete(self, step: int, *, force: bool = False) -> int:
        """Deletes a step; returns the bytes freed.

        Args:
            step: The training step.
            force: Also if it is protected.

        Raises:
            CheckpointNotFoundError: There is no such step.
            ProtectedCheckpointError: The step is protected and ``force`` is False.
            StorageError: The operating system failed an operation, or a save or a load is at work
                in the step. Also where the file system has no locks that every host sees (NFS,
                Lustre, FUSE) and the step no manifest that can be read: nothing tells its files
                from those of a save under way then, and all stay.
        """
        freed_bytes = self._native.delete(check_step(step), force=bool(force))
        drop_mark(self.path(step))
        return freed_bytes

    def retain(self, *, dry_run: bool = False) -> RetentionReport:
        """Deletes what the store does not keep, and says why the rest stays.

        Unlike after a save, all steps count: where a run went back to an earlier step and saved
        from there on, the steps above it are the newest, and what it saved may be what goes.

        Args:
            dry_run: Delete nothing; only tell.

        Raises:
            StorageError: The operating system failed an operation.
            Exception: Whatever ``keep`` raises; nothing was deleted then.

        Example:
            >>> import penstock, tempfile
            >>> root = tempfile.mkdtemp()
            >>> for step in (1, 2, 3):
            ...     report = penstock.CheckpointStore(root).save(step, {"step": step})
            >>> store = penstock.CheckpointStore(root, keep_last=1)
            >>> store.protect(1)
            >>> report = store.retain(dry_run=True)
            >>> report.deleted, report.kept
            ((2,), {1: 'protected', 3: 'among the newest'})
        """
        return self._retention.apply(self._native, None, dry_run=bool(dry_run))

    def protect(self, step: int) -> None:
        """Protects a step from retention and from `delete`, durably, until `unprotect`.

        The mark is a file `protected` in the step's directory: it stays when the step is saved
        again with ``overwrite=True``, and goes with a copy.

        Raises:
            CheckpointNotFoundError: There is no such step.
            IncompleteCheckpointError: Its save never finished.
            StorageError: The operating system failed an operation.
        """
        self._native.protect(check_step(step))

    def unprotect(self, step: int) -> None:
        """Takes the protection of a step away; one that has none stays as it is.

        Raises:
            CheckpointNotFoundError: There is no such step.
            StorageError: The operating system failed an operation.
        """
        self._native.unprotect(check_step(step))

    def protected(self) -> list[int]:
        """The protected steps, oldest first."""
        return self._native.protected()

    def sweep(self, *, dry_run: bool = False, min_age_seconds: int | None = None) -> list[Orphan]:
        """Removes what dead saves left behind; a save that is running is left alone.

        Args:
            dry_run: Remove nothing; only tell what would go.
            min_age_seconds: In a bucket, where no lock tells a dead save from a live one, what is
                younger stays, by the clock of the store: a day where it is not given, and 15
                minutes at least.

        Raises:
            StorageError: The operating system or the store failed an operation.
            TypeError: ``min_age_seconds`` is no int.
            ValueError: It is negative.
        """
        _AGE.check("min_age_seconds", min_age_seconds)
        swept = self._native.sweep(dry_run=bool(dry_run), min_age_seconds=min_age_seconds)
        return [Orphan(*entry) for entry in swept]

    def _retire(self, step: int, stacklevel: int) -> None:
        """Deletes what the store no longer keeps, now that a step is saved."""
        if self._retention.keeps_all:
            return
        try:
            self._retention.apply(self._native, step, dry_run=False)
            self._native.retire_aside()
        except PenstockError as error:
            message = f"step {step} is saved, but older steps could not be deleted: {error}"
            warnings.warn(message, PenstockWarning, stacklevel=stacklevel + 1)
        except Exception as error:
            message = f"step {step} is saved, but nothing was deleted: keep() raised {error!r}"
            warnings.warn(message, PenstockWarning, stacklevel=stacklevel + 1)

    def _reader(self) -> Reader:
        return Reader(self._native, self._root, self._options)
