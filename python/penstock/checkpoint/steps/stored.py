"""`StoredSteps`: the stored steps of a store, whoever saved them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from penstock import _native
from penstock.checkpoint.loading.dcp_files import drop_mark
from penstock.checkpoint.steps.reader import Reader
from penstock.checkpoint.steps.rows import Mark, Orphan, QuarantinedStep, StepInfo, Succession
from penstock.checkpoint.steps.scrub import check_scrub, marks, scrub, verify_files
from penstock.common.events import observed
from penstock.common.option_kinds import Number
from penstock.common.progress import shown
from penstock.common.tracing import call
from penstock.common.warn import warn
from penstock.errors import CorruptCheckpointError, PenstockError
from penstock.reports import Problem
from penstock.signing import Signers
from penstock.tensors.arguments import check_step, to_native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.checkpoint.steps.retention import Retention
    from penstock.common.progress import Progress
    from penstock.options import Options
    from penstock.reports import RetentionReport, ScrubReport, VerifyResult
    from penstock.signing import SignatureKey

_AGE = Number(0, 1 << 40, "seconds")


class StoredSteps:
    """Lists, verifies, protects and deletes the steps of a store.

    Args:
        root: The store's directory.
        retention: The retention rules.
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
        """Returns the directory of a step, whether it exists or not."""
        return self._reader().path(check_step(step))

    def scan(self) -> list[StepInfo]:
        """Returns every step by number, complete or not.

        Checks all files of all steps for existence; `steps` and `latest` check less.
        """
        return sorted(StepInfo(*entry) for entry in self._native.steps())

    def steps(self) -> list[int]:
        """Returns the complete steps, oldest first.

        Reads only the manifest of each step, which is written last. `scan` checks that every file
        of every step exists, and `verify` checks their contents.
        """
        return self._native.committed()

    def succession(self) -> list[Succession]:
        """Returns how each complete step follows the one before, oldest first.

        Reads only manifests, and checks neither MAC nor signature: an attacker can write these
        lists. `load` with ``not_before`` checks the list of the step that it loads.

        Raises:
            StorageError: The operating system failed an operation.

        Example:
            >>> import tempfile
            >>> import numpy as np, penstock
            >>> from penstock.sealing import generate
            >>> home = tempfile.mkdtemp()
            >>> sealing = penstock.Sealing([generate(f"{home}/keys.txt")])
            >>> store = penstock.CheckpointStore(f"{home}/store", sealing=sealing)
            >>> for step in (10, 20, 30):
            ...     report = store.save(step, {"w": np.full(3, step)})
            >>> [(row.step, row.state) for row in store.succession()]
            [(10, 'begins'), (20, 'follows'), (30, 'follows')]
            >>> _ = store.delete(20)
            >>> [(row.step, row.state) for row in store.succession()]
            [(10, 'begins'), (30, 'gap')]
        """
        rows = []
        for step in self._native.committed():
            try:
                found = self._native.lineage(step)
            except CorruptCheckpointError:
                # The checkpoint of another step: `verify` reports it.
                continue
            if found is not None:
                rows.append((step, *found))
        return Succession.of(rows)

    def quarantine(self, step: int) -> str:
        """Quarantines a damaged step: renames it within the store, so that it is no step any more.

        `save` does this with a damaged step that it replaces, and ``load`` with ``fallback=True``
        with those that it skipped. `load`, `steps` and `sweep` ignore a step that was quarantined.
        With ``keep_last``, each save removes all of them but the last three and the protected ones.

        Args:
            step: The training step.

        Returns:
            The new path, for `penstock.explain`, `penstock.salvage` and `penstock.verify`.

        Raises:
            CheckpointNotFoundError: There is no such step.
            PenstockError: The step is not known to be damaged.
            StorageError: The operating system failed an operation, the step is being read, or the
                file system has no locks that all hosts see: there a step stays until it is saved
                again with ``overwrite=True``, or deleted.

        Example:
            >>> import numpy as np, os, penstock, tempfile
            >>> store = penstock.CheckpointStore(tempfile.mkdtemp())
            >>> for step in (10, 20):
            ...     report = store.save(step, {"w": np.full(3, step)})
            >>> shard = penstock.inspect(store.path(20)).files[-1].name
            >>> os.truncate(os.path.join(store.path(20), shard), 5)
            >>> path = store.quarantine(20)
            >>> store.quarantined() == [(20, path)], store.load()["w"]
            (True, array([10, 10, 10]))
        """
        path = self._native.quarantine(check_step(step))
        if path is None:
            raise PenstockError(
                f"{self.path(step)} is not known to be damaged and stays: store.verify({step}) "
                f"reads it and records what it finds, as `penstock verify {self._root}` does"
            )
        return path

    def quarantined(self) -> list[QuarantinedStep]:
        """Returns the damaged steps that were quarantined, in that order.

        Raises:
            StorageError: The operating system failed an operation.
        """
        return [QuarantinedStep(*entry) for entry in self._native.quarantined()]

    def marks(self) -> dict[int, Mark]:
        """Returns the recorded outcomes of `load`, `verify` and `scrub` for each step read whole.

        Raises:
            CorruptCheckpointError: The records are unreadable. Until the next `verify` or `scrub`
                repairs them, `keep_last` deletes nothing.
            StorageError: The operating system failed an operation.
        """
        return marks(self._native)

    def verify(
        self,
        step: int,
        *,
        progress: bool | Progress = False,
        signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
    ) -> VerifyResult:
        """Reads every byte of a step and compares it with its digest.

        A step found good counts as verified: `keep_last` never deletes the newest such step. A step
        found damaged does not count for `keep_last` and is not deleted by it.

        Args:
            step: The training step.
            progress: True for a bar, or a function called with the bytes done and the total bytes.
            signed_by: Compare the files with a signature by one of these keys too; see
                `penstock.verify`.

        Raises:
            CheckpointNotFoundError: There is no such step.
            SignatureError: None of ``signed_by`` has signed it; `NotSignedError` if nobody has.
        """
        signers = Signers.resolve(signed_by)
        return self._verify(self.path(step), step, progress, signers)

    @observed("verify")
    def _verify(
        self, path: str, step: int, progress: bool | Progress, signers: Signers | None
    ) -> VerifyResult:
        misplaced: tuple[Problem, ...] = ()
        checkpoint_id = None
        try:
            checkpoint_id = self._native.identity(step)
        except CorruptCheckpointError as error:
            misplaced = (
                Problem(file=_native.MANIFEST, offset=None, tensor=None, message=str(error)),
            )
        native = None if signers is None else signers.native
        result = verify_files(path, to_native(self._options), progress, native)
        if checkpoint_id is not None and (result.ok or any(p.is_proven for p in result.problems)):
            self._reader().mark(step, checkpoint_id, is_good=result.ok)
        if misplaced:
            return dataclasses.replace(result, ok=False, problems=misplaced + result.problems)
        return result

    def scrub(
        self,
        *,
        bytes_per_second: int | None = None,
        max_age_seconds: float | None = 7 * 86_400,
        progress: bool | Progress = False,
    ) -> ScrubReport:
        """Verifies steps before they are needed, and records the outcomes.

        Steps that were never verified come first, newest first, then those verified longest ago.
        The outcome of every step is recorded as soon as it was read, as by `load` and `verify`: a
        scrub that is stopped (Ctrl-C) continues there when it is called again. Retention keeps the
        newest good step, and does not count damaged ones.

        Args:
            bytes_per_second: Upper bound of the read rate, so that training is not slowed down.
                Reads have 1 MiB: lower rates hold on average only.
            max_age_seconds: Skip steps that were verified more recently than this; 0 reads every
                step, None reads no step twice.
            progress: True for a bar, or a function called with the bytes done and the total bytes.

        Raises:
            StorageError: The operating system failed an operation; a step that it cannot read is
                listed in the report instead.
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
            force: Whether to delete a protected step as well.

        Raises:
            CheckpointNotFoundError: There is no such step.
            ProtectedCheckpointError: The step is protected and ``force`` is False.
            StorageError: The operating system failed an operation, or a save or a load uses the
                step. Also raised if the file system has no locks that every host sees (NFS, Lustre,
                FUSE) and the step has no readable manifest: its files cannot be told from those of
                a running save, and all stay.
        """
        freed_bytes = self._native.delete(check_step(step), force=bool(force))
        drop_mark(self.path(step))
        return freed_bytes

    def retain(self, *, dry_run: bool = False) -> RetentionReport:
        """Deletes the steps that retention does not keep, and reports why it keeps the others.

        Unlike after a save, all steps count: if a run returned to an earlier step and saved from
        there, the old steps above it are the newest, and its own steps may be deleted.

        Args:
            dry_run: Whether to delete nothing.

        Raises:
            StorageError: The operating system failed an operation.
            Exception: Any error of ``keep``; nothing was deleted then.

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
        """Protects a step from retention and `delete`, durably, until `unprotect`.

        The mark is a file `protected` in the step's directory: it stays if the step is saved again
        with ``overwrite=True``, and is part of any copy of the directory.

        Raises:
            CheckpointNotFoundError: There is no such step.
            IncompleteCheckpointError: The save of the step never finished.
            StorageError: The operating system failed an operation.
        """
        self._native.protect(check_step(step))

    def unprotect(self, step: int) -> None:
        """Removes the protection of a step; does nothing for an unprotected step.

        Raises:
            CheckpointNotFoundError: There is no such step.
            StorageError: The operating system failed an operation.
        """
        self._native.unprotect(check_step(step))

    def protected(self) -> list[int]:
        """Returns the protected steps, oldest first."""
        return self._native.protected()

    def sweep(self, *, dry_run: bool = False, min_age_seconds: int | None = None) -> list[Orphan]:
        """Removes the files that dead saves left behind, but none of a running save.

        Args:
            dry_run: Whether to remove nothing and only report.
            min_age_seconds: In a bucket, where no lock distinguishes a dead save from a live one:
                files younger than this, by the service's clock, stay. A day by default, and at
                least 15 minutes.

        Raises:
            StorageError: The operating system or the object store failed an operation.
            TypeError: ``min_age_seconds`` is not an int.
            ValueError: ``min_age_seconds`` is negative.
        """
        _AGE.check("min_age_seconds", min_age_seconds)
        swept = self._native.sweep(dry_run=bool(dry_run), min_age_seconds=min_age_seconds)
        return [Orphan(*entry) for entry in swept]

    def _retire(self, step: int) -> None:
        """Deletes steps by the retention rules, after a step was saved."""
        if self._retention.keeps_all:
            return
        try:
            self._retention.apply(self._native, step, dry_run=False)
            self._native.retire_quarantined()
        except PenstockError as error:
            warn(f"step {step} is saved, but older steps could not be deleted: {error}")
        except Exception as error:
            warn(f"step {step} is saved, but nothing was deleted: keep() raised {error!r}")

    def _reader(self) -> Reader:
        return Reader(self._native, self._root, self._options)
