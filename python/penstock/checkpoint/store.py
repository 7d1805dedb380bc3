"""`CheckpointStore`: a directory of checkpoints by training step."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, overload

from penstock import _native
from penstock.checkpoint import api
from penstock.checkpoint.loading.foreign import is_checkpoint, not_a_store
from penstock.checkpoint.loading.load import Wanted
from penstock.checkpoint.mirroring.restoring import MirroredSteps
from penstock.checkpoint.ranks.group import find as find_ranks
from penstock.checkpoint.saving.alone import save_alone
from penstock.checkpoint.saving.destination import Destination
from penstock.checkpoint.saving.groups import Groups, read_files
from penstock.checkpoint.saving.save_queue import Turns
from penstock.checkpoint.saving.together import save_together
from penstock.checkpoint.steps import restore
from penstock.checkpoint.steps.retention import Retention
from penstock.checkpoint.view.live import LiveState
from penstock.common.events import observed
from penstock.common.paths import absolute
from penstock.common.tracing import call
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from penstock.io.arguments import (
    check_patterns,
    check_step,
    decode_path,
    encode_metadata,
    to_native,
)
from penstock.reports import Problem

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed import ProcessGroup

    from penstock.checkpoint.mirroring.mirror import Mirror
    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.saving.groups import Files
    from penstock.checkpoint.saving.pending import PendingSave
    from penstock.checkpoint.steps.retention import Keep
    from penstock.checkpoint.training.training import Training
    from penstock.common.progress import Progress
    from penstock.options import Options
    from penstock.reports import LoadReport, SaveReport, VerifyResult


class CheckpointStore(MirroredSteps):
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
        mirror: Where in a bucket the steps are copied to in the background; None for nowhere.
            `load` and `latest` see what is here and there.
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
        mirror: Mirror | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        # A later change of the working directory moves no store.
        where = absolute(decode_path(root))
        if is_checkpoint(where):
            raise not_a_store(where)
        retention = Retention(keep_last, keep_every, keep)
        to_native(options)
        super().__init__(where, retention, options, mirror)
        self._process_group = process_group
        self._no_dist = no_dist
        self._ranks()
        self._turns = Turns(self._root)

    def __repr__(self) -> str:
        return f"CheckpointStore({self._root!r})"

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        progress: bool | Progress = False,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
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
            groups: Tensors that readers of models are to find; see `penstock.save`.
            files: Small files that lie beside the shards; see `penstock.save`.

        Raises:
            CheckpointExistsError: The step is complete already and ``overwrite`` is False.
            RankError: Another rank failed, is not there, or this one has no process group.
            UnsupportedStateError: A leaf cannot be stored; the message names it.
            StorageError: The operating system failed an operation.
        """
        destination = self._destination(step, metadata, overwrite, groups, files)
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
            self._after_save(destination.step or 0, 5)
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
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
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
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
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
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
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
        `SaveReport.fallbacks` says why. No kernel watches the memory of a GPU: there every
        optimizer of PyTorch waits for the copy by its stream, and of other changes those are
        noticed that PyTorch counts; `PendingSave.hold` comes before the rest. Tensors of up to
        64 KiB are copied at the call in any case, the smallest first and up to 64 MiB, and so are
        arrays, pinned tensors and tensors of inference mode; with more than 64 MiB of those, or one
        of a GPU, all is.

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
            groups: Tensors that readers of models are to find; see `penstock.save`.
            files: Small files that lie beside the shards; see `penstock.save`.

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
        destination = self._destination(step, metadata, overwrite, groups, files)
        with call("stall", "save_async", destination.path):
            return self._turns.save_async(
                functools.partial(self._ranks, to_save=True),
                destination,
                state,
                to_native(self._options),
                lazy=lazy,
                if_busy=if_busy,
                after=lambda: self._after_save(step, 0),
            )

    def _ranks(self, *, to_save: bool = False) -> Ranks | None:
        return find_ranks(self._process_group, no_dist=self._no_dist, to_save=to_save)

    def _destination(
        self,
        step: int,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        groups: Mapping[str, str] | None,
        files: Files | None,
    ) -> Destination:
        return Destination(
            path=self.path(step),
            step=check_step(step),
            metadata=encode_metadata(metadata),
            overwrite=bool(overwrite),
            store=self._native,
            groups=Groups.check(groups),
            files=read_files(files),
        )

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
        plain: bool = False,
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
            device: Where new tensors shall be; see `penstock.load`.
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
            plain: Load values of classes as what is stored of them; see `penstock.load`.

        Raises:
            CheckpointNotFoundError: There is no complete step, or not the one asked for.
            IncompleteCheckpointError: The save of the step asked for never finished.
            PartialCheckpointError: The step asked for was salvaged, and ``allow_partial`` is False.
            CorruptCheckpointError: Data is damaged; the message names the step to go back to. With
                ``fallback``, there are steps, or such as were set aside, and none is good.
            FormatVersionError: A newer Penstock wrote it.
            StateMismatchError: A key matches nothing, or ``into`` does not fit.
            DeviceError: A GPU is in the way; see `penstock.load`.
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
            is_plain=bool(plain),
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
            StateMismatchError: The training does not fit the api.
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
        return restore.load(
            self._reader_of(ranks, fallback=fallback),
            ranks,
            last,
            wanted,
            where=self._root if last is None else self.path(last),
            fallback=fallback,
            report=report,
            stacklevel=4,
        )

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
        result = api.verify(path, options=self._options, progress=progress)
        if checkpoint_id is not None and (result.ok or any(p.is_proven for p in result.problems)):
            self._reader().mark(step, checkpoint_id, is_good=result.ok)
        if misplaced:
            return dataclasses.replace(result, ok=False, problems=misplaced + result.problems)
        return result
