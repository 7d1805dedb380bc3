"""`CheckpointStore`: a directory of checkpoints by training step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from penstock import _native, checkpoint
from penstock.calls.arguments import (
    check_patterns,
    check_step,
    decode_path,
    encode_metadata,
    to_native,
)
from penstock.calls.events import observed
from penstock.calls.progress import shown
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PenstockError,
    PenstockWarning,
)
from penstock.loading.foreign import is_checkpoint, not_a_store
from penstock.loading.load import Wanted
from penstock.options import Options
from penstock.ranks.group import find as find_ranks
from penstock.reports import Problem, ScrubReport
from penstock.saving.alone import save_alone
from penstock.saving.destination import Destination
from penstock.saving.together import save_together
from penstock.saving.turns import Turns
from penstock.state.live import LiveState
from penstock.steps import delivery
from penstock.steps.reader import Reader
from penstock.steps.retention import Retention
from penstock.steps.rows import Mark, Orphan, SetAside, StepInfo
from penstock.steps.scrub import check_scrub, marks, scrub
from penstock.tracing import call, span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.distributed import ProcessGroup

    from penstock.calls.progress import Progress
    from penstock.ranks.group import Ranks
    from penstock.reports import LoadReport, RetentionReport, SaveReport, VerifyResult
    from penstock.saving.pending import PendingSave
    from penstock.steps.retention import Keep
    from penstock.training.training import Training


class CheckpointStore:
    """A directory with one checkpoint per training step.

    Every step is a directory of its own that can be copied, moved and uploaded. The store keeps no
    index: what is there is what counts, and any number of processes may read it.

    Args:
        root: The store's directory; the first save makes it.
        keep_last: After each save, delete all complete steps but so many of the newest. None
            keeps all. The newest step that was read back and found good is always kept.
        keep_every: Also keep every step that is a multiple of this, whatever its age.
        keep: Asked about each step that would be deleted, with the step and the metadata it was
            saved with: True keeps it. If it raises, nothing is deleted and the save stands.
        options: How bytes move; None for ``Options()``.
        process_group: The ranks that use it together, where `torch.distributed` is initialized;
            None for all.
        no_dist: Use it alone, whatever ranks there are.

    Where ranks use it together, all of them call `save`, `save_async` and, without a step, `load`
    in the same order; see `penstock.save`. What deletes is done by rank 0. A store may be made
    before there is a process group: it looks for one at each call. Without one, saves of a rank are
    refused, and each loads by itself, the step that it finds.

    Raises:
        CheckpointNotFoundError: There is a checkpoint at ``root``, which is no store.
        ValueError: An argument is out of range.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> store = penstock.CheckpointStore(tempfile.mkdtemp(), keep_last=2)
        >>> for step in (10, 20, 30):
        ...     report = store.save(step, {"w": np.full(3, step), "step": step})
        >>> store.steps()
        [20, 30]
        >>> store.load()["step"]
        30
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | bytes,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep: Keep | None = None,
        options: Options | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        # A later change of the working directory moves no store.
        self._root = os.path.abspath(decode_path(root))
        if is_checkpoint(self._root):
            raise not_a_store(self._root)
        self._retention = Retention(keep_last, keep_every, keep)
        to_native(options)
        self._options = options
        self._native = _native.Store(self._root)
        self._process_group = process_group
        self._no_dist = no_dist
        self._ranks()
        self._turns = Turns(self._root)

    def __repr__(self) -> str:
        return f"CheckpointStore({self._root!r})"

    @property
    def root(self) -> str:
        """The store's directory."""
        return self._root

    def path(self, step: int) -> str:
        """The directory of a step, whether it exists or not."""
        return self._reader().path(check_step(step))

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        progress: bool | Progress = False,
    ) -> SaveReport:
        """Saves a state as a step, then deletes what the store no longer keeps.

        Nothing is deleted before the new step is on stable storage. A failure to delete, or of
        the function ``keep``, is a `PenstockWarning`: the save stands. A step that is in the way
        and known to be damaged is set aside, with a `PenstockWarning`; see `set_aside`.

        Args:
            step: The training step.
            state: What to save; see `penstock.save`.
            metadata: A note of plain JSON.
            overwrite: Replace the step if it is complete already. One that is known to be damaged
                is set aside all the same, where it can be.
            progress: True for a bar on standard error, or a function of bytes done and in all.

        Raises:
            CheckpointExistsError: The step is complete already and ``overwrite`` is False.
            RankError: Another rank failed, is not there, or this one has no process group.
            UnsupportedStateError: A leaf cannot be stored; the message names it.
            StorageError: The operating system failed an operation.
        """
        destination = self._destination(step, metadata, overwrite)
        with call("stall", "save", destination.path):
            return self._save(destination, state, progress)

    @observed("save")
    def _save(self, destination: Destination, state: Any, progress: bool | Progress) -> SaveReport:
        options = to_native(self._options)
        ranks, seconds = self._ranks(to_save=True), options["rank_timeout_seconds"]
        with self._turns.together(ranks, destination, "wait", seconds) as (together, _):
            if together is not None:
                report = save_together(destination, state, together, options, progress)
            else:
                report = save_alone(destination, state, options, progress)
        self._turns.saved(report)
        if together is None or together.is_coordinator:
            with span("retire"):
                self._retire(destination.step or 0, 4)
        return report

    @overload
    def save_async(
        self,
        step: int,
        state: Any,
        *,
        lazy: bool = False,
        if_busy: Literal["wait", "error"] = "wait",
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> PendingSave: ...
    @overload
    def save_async(
        self,
        step: int,
        state: Any,
        *,
        lazy: bool = False,
        if_busy: Literal["skip"],
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> PendingSave | None: ...
    def save_async(
        self,
        step: int,
        state: Any,
        *,
        lazy: bool = False,
        if_busy: Literal["wait", "skip", "error"] = "wait",
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> PendingSave | None:
        """Saves a state as a step in the background.

        The state is copied into memory that the store keeps for the next save, and may be changed
        as soon as this returns. ``Options.staging_bytes`` bounds that memory; what exceeds it waits
        until the first of it is written. `close` gives it back.

        With ``lazy=True`` this returns at once, and the state is copied while training goes on: it
        may not be changed before `PendingSave.stage`, which `penstock.guard` calls for an optimizer
        at the right moment. Whoever changes it earlier, and however, fails the save: the kernel
        watches the memory. Where it does not (before Linux 6.7, in containers that are refused
        ``userfaultfd``, while another state is watched, for memory that processes share or that a
        file is mapped to), the state is copied at the call, as without ``lazy``, and
        `SaveReport.fallbacks` says why. Tensors of up to 64 KiB are copied at the call in any case,
        the smallest first and up to 64 MiB, and so are arrays, pinned tensors and tensors of
        inference mode; with more than 64 MiB of those, all is.

        Among many ranks, a rank whose state has plain tensors reads them at the call, lazy or not,
        and waits until all ranks have come: they find out who holds the same ones. What it holds
        of replicated `DTensor`s it reads at the call as well. Where no launcher says how many
        ranks a machine has, the first call of all also waits for all ranks.

        A save that failed raises its error from the next `save` or `save_async`, unless somebody
        has had it from `PendingSave.result`; that next save is not done then.

        Args:
            step: The training step.
            state: What to save; see `penstock.save`.
            lazy: Whether to copy the state later.
            if_busy: What to do while the store's last save is still running: ``"wait"`` for it,
                ``"skip"`` this one and return None, or raise an ``"error"``. Among many ranks,
                all pass the same, and what rank 0 finds counts for all.
            metadata: A note of plain JSON.
            overwrite: Replace the step if it is complete already.

        Raises:
            CheckpointExistsError: The step is complete already and ``overwrite`` is False.
            SaveInProgressError: The last save is still running and ``if_busy`` is ``"error"``.
            RankError: Another rank failed, is not there, or this one has no process group.
            UnsupportedStateError: A leaf cannot be stored; the message names it.
            PenstockError: The error of the last save, if nobody has seen it.

        Example:
            >>> import numpy as np, penstock, tempfile
            >>> with penstock.CheckpointStore(tempfile.mkdtemp()) as store:
            ...     for step in range(3):
            ...         pending = store.save_async(step, {"w": np.full(3, step)})
            >>> store.steps()
            [0, 1, 2]
        """
        if if_busy not in ("wait", "skip", "error"):
            raise ValueError(f"if_busy={if_busy!r}: must be one of 'wait', 'skip', 'error'")
        destination = self._destination(step, metadata, overwrite)
        with call("stall", "save_async", destination.path):
            return self._turns.save_async(
                functools.partial(self._ranks, to_save=True),
                destination,
                state,
                to_native(self._options),
                lazy=lazy,
                if_busy=if_busy,
                after=lambda: self._retire(step, 0),
            )

    def wait(self) -> None:
        """Waits for the store's last `save_async`, if one is running.

        Raises:
            PenstockError: Its error, if nobody has seen it.
        """
        self._turns.wait()

    def close(self) -> None:
        """Waits for the last `save_async` and gives its memory back; the store stays usable.

        Raises:
            PenstockError: The error of that save, if nobody has seen it.
        """
        self._turns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except PenstockError as failed:
            if error is None:
                raise
            # What ended the block is what its caller has to hear.
            error.add_note(f"and a save in the background failed: {failed}")

    def _ranks(self, *, to_save: bool = False) -> Ranks | None:
        return find_ranks(self._process_group, no_dist=self._no_dist, to_save=to_save)

    def _destination(
        self, step: int, metadata: Mapping[str, Any] | None, overwrite: bool
    ) -> Destination:
        return Destination(
            path=self.path(step),
            step=check_step(step),
            metadata=encode_metadata(metadata),
            overwrite=bool(overwrite),
            store=self._native,
        )

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

    def load(
        self,
        step: int | None = None,
        *,
        into: Any = None,
        keys: str | Iterable[str] | None = None,
        device: Any = None,
        fallback: bool = False,
        allow_partial: bool = False,
        progress: bool | Progress = False,
        report: Callable[[LoadReport], object] | None = None,
    ) -> Any:
        """Loads the newest complete step, or the one asked for.

        Where many ranks use the store together, all of them call this without ``step``, or with
        ``fallback``, and load the same step, which rank 0 finds; see `penstock.load`.

        Steps that were never finished are passed over. Damaged ones, and what was salvaged of
        them, are passed over with a `PenstockWarning` that says why. Damage that shows only while
        data is read is an error, since silently resuming from older weights is a choice that is
        not ours to make; ``fallback=True`` makes it. So is a newest step that the system does not
        let be read: it may well be good. Older ones that cannot be read are in nobody's way.

        Args:
            step: The training step; None for the newest complete one.
            into: A state to fill; see `penstock.load`. With ``fallback``, targets that a bad step
                has filled in part are filled whole by the good one.
            keys: What to load; see `penstock.load`. Only that is checked.
            device: Where to put tensors; None for the host.
            fallback: Go back to the newest step that turns out to be good, from ``step`` on if it
                is given; digests are checked whatever the options say. Each step passed over is a
                `PenstockWarning`, and in the report's ``skipped``; so are those that the user may
                not read. A step that takes a newer Penstock to read is an error all the same. Once
                a good one is found, those that are damaged are set aside, where the store can be
                written; see `set_aside`.
            allow_partial: Of a ``step`` that was salvaged, load what is there; see `penstock.load`.
                Only a step that is asked for can be partial.
            progress: True for a bar on standard error, or a function of bytes done and in all.
            report: Called with the `LoadReport` when the state is complete.

        Raises:
            CheckpointNotFoundError: There is no complete step, or not the one asked for; with
                ``fallback``, none is good.
            IncompleteCheckpointError: The save of the step asked for never finished.
            PartialCheckpointError: The step asked for was salvaged, and ``allow_partial`` is False.
            CorruptCheckpointError: Data is damaged; the message names the step to go back to.
            FormatVersionError: A newer Penstock wrote it.
            StateMismatchError: A key matches nothing, or ``into`` does not fit.
            RankError: Another rank has not come to load.
            StorageError: The operating system failed an operation.
        """
        ranks = self._ranks()
        wanted = Wanted(
            into=into,
            keys=check_patterns(keys),
            device=device,
            progress=progress,
            allow_partial=bool(allow_partial),
            own_rank=None if ranks is None else ranks.rank,
        )
        last = None if step is None else check_step(step)
        return self._load(ranks, last, wanted, fallback=fallback, report=report)

    def resume(
        self,
        training: Training,
        *,
        strict: bool = True,
        progress: bool | Progress = False,
        report: Callable[[LoadReport], object] | None = None,
    ) -> int | None:
        """Restores a training from the newest good step.

        A step that is damaged, or cannot be read, is passed over for an older one with a
        `PenstockWarning` that says why; so it is by every rank where one of them finds it bad. The
        training is changed when all of a step was read and compared, and not before. Saving goes
        on at whatever step.

        Where many ranks use the store together, all of them call this, with the same parts. They
        may be more or fewer than those that saved.

        Args:
            training: What to restore; in a fresh process, built as for a new run.
            strict: Whether the checkpoint and the training have to have the same parts. Otherwise
                those that both have are restored.
            progress: True for a bar on standard error, or a function of bytes done and in all.
            report: Called with the `LoadReport` when the training is restored.

        Returns:
            The step, or None where the store has none: then it is a new run.

        Raises:
            CorruptCheckpointError: There are steps, or such as were set aside, and none is good.
            FormatVersionError: A newer Penstock wrote the newest one.
            StateMismatchError: The training does not fit the checkpoint.
            RankError: Another rank has not come, or could not restore it.
            StorageError: The operating system failed an operation.
            PenstockError: The error of the last save, if nobody has seen it.

        Example:
            >>> import penstock, tempfile
            >>> store = penstock.CheckpointStore(tempfile.mkdtemp())
            >>> training = penstock.Training(losses=[])
            >>> step = store.resume(training) or 0
            >>> while step < 3:
            ...     training.losses.append(1 / (step := step + 1))
            ...     report = store.save(step, training)
            >>> store.resume(training)
            3
        """
        if not isinstance(training, LiveState):
            raise TypeError(
                f"training: {type(training).__name__} is no penstock.Training; load(into=…) fills "
                "a state"
            )
        # What a lazy save has still to copy must not change.
        self._turns.wait()
        ranks = self._ranks()
        wanted = Wanted(
            into=training,
            progress=progress,
            own_rank=None if ranks is None else ranks.rank,
            is_strict=bool(strict),
        )
        reports: list[LoadReport] = []
        try:
            self._load(ranks, None, wanted, fallback=True, report=reports.append)
        except CheckpointNotFoundError:
            return None
        self._turns.restored(reports[0].step)
        if report is not None:
            report(reports[0])
        return reports[0].step

    def _load(
        self,
        ranks: Ranks | None,
        last: int | None,
        wanted: Wanted,
        *,
        fallback: bool,
        report: Callable[[LoadReport], object] | None,
    ) -> Any:
        return delivery.load(
            Reader(self._native, self._root, self._options, ranks),
            ranks,
            last,
            wanted,
            where=self._root if last is None else self.path(last),
            fallback=fallback,
            report=report,
            stacklevel=4,
        )

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

    def verify(self, step: int, *, progress: bool | Progress = False) -> VerifyResult:
        """Reads every byte of a step and compares it with its digest.

        A step that was found good counts as read back: `keep_last` never deletes the newest such.
        One that was found damaged neither counts for `keep_last` nor is deleted by it.

        Args:
            step: The training step.
            progress: True for a bar on standard error, or a function of bytes done and in all.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        return self._verify(self.path(step), step, progress)

    @observed("verify")
    def _verify(self, path: str, step: int, progress: bool | Progress) -> VerifyResult:
        misplaced: tuple[Problem, ...] = ()
        checkpoint_id = None
        try:
            checkpoint_id = self._native.identity(step)
        except CorruptCheckpointError as error:
            misplaced = (
                Problem(file=_native.MANIFEST, offset=None, tensor=None, message=str(error)),
            )
        result = checkpoint.verify(path, options=self._options, progress=progress)
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
        return self._native.delete(check_step(step), force=bool(force))

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

    def sweep(self, *, dry_run: bool = False) -> list[Orphan]:
        """Removes what dead saves left behind; a save that is running is left alone.

        Args:
            dry_run: Remove nothing; only tell what would go.

        Raises:
            StorageError: The operating system failed an operation.
        """
        return [Orphan(*entry) for entry in self._native.sweep(dry_run=bool(dry_run))]

    def _reader(self) -> Reader:
        return Reader(self._native, self._root, self._options)


class LastSave:
    """What the last save of a run asks of a store, beside what everybody may; for `Preemption`.

    Args:
        store: The store.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    @property
    def ranks(self) -> Ranks | None:
        """Who saves together; None for this process alone."""
        return self._store._ranks()

    @property
    def pending(self) -> PendingSave | None:
        """The last save in the background, unless somebody has waited for it here."""
        return self._store._turns.pending

    @property
    def needed_seconds(self) -> float:
        """How long the last save took; 0 where there was none."""
        return self._store._turns.last_seconds

    def covers(self, step: int) -> bool:
        """Whether a step is saved: last of all, or under way, or what was resumed from."""
        return self._store._turns.covers(step)

    @contextlib.contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Has the store wait for other ranks no longer than that."""
        store = self._store
        options = store._options
        current = options or Options()
        limit = max(min(current.rank_timeout_seconds, int(seconds)), 1)
        store._options = dataclasses.replace(current, rank_timeout_seconds=limit)
        try:
            yield
        finally:
            store._options = options
