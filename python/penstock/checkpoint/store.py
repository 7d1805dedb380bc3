"""`CheckpointStore`: a directory of checkpoints by training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from penstock.checkpoint.loading.load import LoadRequest, check_expected
from penstock.checkpoint.loading.path_kind import is_checkpoint, not_a_store
from penstock.checkpoint.mirroring.restoring import MirroredSteps
from penstock.checkpoint.saver import Closing, Saver
from penstock.checkpoint.saving.destination import Destination, Lineage
from penstock.checkpoint.steps import restore
from penstock.checkpoint.steps.paced_run import PacedRun
from penstock.checkpoint.steps.retention import Retention
from penstock.checkpoint.steps.stored import StoredSteps
from penstock.checkpoint.view.live import LiveState
from penstock.common.paths import absolute
from penstock.common.tracing import span
from penstock.errors import CheckpointNotFoundError
from penstock.sealing.sealing import check_sealing
from penstock.sealing.unsealing import Unsealing
from penstock.signing import SigningKeys
from penstock.tensors.arguments import check_patterns, check_step, decode_path, to_native

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
    from penstock.reports import LoadReport, MirrorStatus, SaveReport
    from penstock.sealing import Identities, Key, Sealing
    from penstock.signing import SignatureKey, Signers


class CheckpointStore(StoredSteps, Closing):
    """A directory with one checkpoint per training step.

    Every step is a directory of its own that can be copied, moved and uploaded. The store has no
    index: the directories present are its steps, and any number of processes may read them.

    Args:
        root: The store's directory; created by the first save.
        keep_last: Number of newest complete steps to keep after each save; older ones are deleted.
            None keeps all. The newest step that was verified as good is always kept.
        keep_every: Also keep every step that is a multiple of this, whatever its age.
        keep: Called for each step that would be deleted, with the step and its metadata: True keeps
            the step. If it raises, nothing is deleted, and the save still succeeds.
        options: How bytes move; None for ``Options()``.
        mirror: The bucket to which steps are copied in the background; None for no copy. `load` and
            `latest` consider both the local steps and the bucket's.
        process_group: The ranks that use the store together, if `torch.distributed` is initialized;
            None for all ranks.
        no_dist: Use the store without other ranks.
        save_every: Steps between two saves, for `due`; or ``"auto"``: as many as lose least time to
            saves and failures, measured while the run goes on.
        failures_per_hour: Failures of the whole job, for ``save_every="auto"``. None for those that
            the history of the store counts, beginning with published rates of nodes.
        save_seconds_max: With ``save_every="auto"``, the longest time between two saves.
        sealing: For whom each step is sealed; see `penstock.save`. Loads then refuse clear steps.
            None for clear steps.
        identities: Keys that open sealed steps; see `penstock.load`. Loads then refuse clear steps.
            None for the file that ``PENSTOCK_IDENTITIES`` names, if any.
        signed_by: Public keys of which one must have signed a step; see `penstock.load`. Loads
            refuse every other step with `SignatureError`, and never go back to an older one for
            that. None to look at no signature.
        sign: Private keys that sign every step while it is saved; see `penstock.save`. None for
            none.

    Ranks that use a store together all call `save`, `save_async` and, without a step, `load` in the
    same order; see `penstock.save`. Rank 0 deletes steps. A store may be created before the process
    group: each call looks for one. Without a process group, a rank's saves are refused, and its
    loads find a step without the other ranks.

    Raises:
        CheckpointNotFoundError: ``root`` is a checkpoint, not a store.
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
        save_every: int | Literal["auto"] | None = None,
        failures_per_hour: float | None = None,
        save_seconds_max: float = 3600.0,
        sealing: Sealing | None = None,
        identities: Identities | Key | Iterable[Key] | None = None,
        signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
        sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
    ) -> None:
        # The path is made absolute: a later change of the working directory must not move the
        # store.
        where = absolute(decode_path(root))
        if is_checkpoint(where):
            raise not_a_store(where)
        super().__init__(where, Retention(keep_last, keep_every, keep), options)
        self._saver = Saver(options=options, process_group=process_group, no_dist=no_dist)
        check_sealing(sealing)
        self._mirrored = MirroredSteps(
            self._native,
            where,
            options,
            mirror,
            is_sealed=sealing is not None or identities is not None,
            is_signed=signed_by is not None,
        )
        self._run = PacedRun(
            where,
            save_every,
            failures_per_hour=failures_per_hour,
            save_seconds_max=save_seconds_max,
        )
        self._saver.record(self._run)
        self._sealing = sealing
        self._signing = SigningKeys.resolve(sign)
        self._lineage = Lineage(self._native)
        self._unsealing = Unsealing.of(
            identities, is_demanded=sealing is not None, signed_by=signed_by
        )
        self._error: BaseException | None = None
        # Refuses a process group that cannot be used.
        self._ranks()

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
        """Saves a state as a step, then deletes the steps that retention does not keep.

        Nothing is deleted before the new step is on stable storage. If deletion or the function
        ``keep`` fails, a `PenstockWarning` is issued and the save still succeeds. An existing step
        that is known to be damaged is quarantined, with a `PenstockWarning`; see `quarantine`.

        Args:
            step: The training step.
            state: What to save; see `penstock.save`.
            metadata: A note of plain JSON.
            overwrite: Replace the step if it is already complete. A step that is known to be
                damaged is quarantined instead, where possible.
            progress: True for a bar, or a function called with the bytes done and the total bytes.
            groups: Tensors that readers of models shall find; see `penstock.save`.
            files: Small files stored beside the shards; see `penstock.save`.

        Raises:
            CheckpointExistsError: The step is already complete and ``overwrite`` is False.
            RankError: Another rank failed or is missing, or this rank has no process group.
            UnsupportedStateError: A leaf cannot be stored; the message names it.
            StorageError: The operating system failed an operation.
        """
        destination = self._destination(step, metadata, overwrite, groups, files)
        return self._saver._save(destination, state, progress, self._after_save)

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
        after the return. ``Options.staging_bytes`` bounds that memory; data beyond it waits until
        the first data is written. `close` releases the memory.

        With ``lazy=True`` the call returns at once, and the state is copied while training
        continues. The state must not be changed before `PendingSave.stage`, which `penstock.guard`
        calls for an optimizer at the right moment. Any earlier change fails the save: the kernel
        watches the memory. If the kernel cannot watch it (before Linux 6.7, in containers that are
        refused ``userfaultfd``, while another state is watched, for memory shared between processes
        or mapped from a file), the state is copied at the call, as without ``lazy``, and
        `SaveReport.fallbacks` gives the reason. No kernel watches the memory of a GPU: there, the
        streams of all PyTorch optimizers wait for the copy. Other changes are noticed if PyTorch
        counts them; before the remaining ones, call `PendingSave.hold`. Tensors of up to 64 KiB are
        always copied at the call, the smallest first and up to 64 MiB in all. Arrays, pinned
        tensors and tensors of inference mode are copied as well; if those exceed 64 MiB, or one is
        on a GPU, the whole state is copied at the call.

        Among many ranks, a rank whose state has plain tensors reads them at the call, lazy or not,
        and waits until all ranks have arrived, because the ranks compare which of them hold the
        same tensors. The rank also reads its replicated `DTensor`s at the call. If no launcher
        reports the number of ranks per machine, the first call also waits for all ranks.

        The error of a failed save is raised by the next `save` or `save_async`, which then saves
        nothing, unless `PendingSave.result` has already raised it.

        Args:
            step: The training step.
            state: What to save; see `penstock.save`.
            lazy: Whether to copy the state after the call, while training continues.
            if_busy: Policy while the store's last save is still running: ``"wait"`` for it,
                ``"skip"`` this save and return None, or raise an ``"error"``. All ranks pass the
                same policy, and rank 0's observation decides for all.
            metadata: A note of plain JSON.
            overwrite: Replace the step if it is already complete.
            groups: Tensors that readers of models shall find; see `penstock.save`.
            files: Small files stored beside the shards; see `penstock.save`.

        Raises:
            CheckpointExistsError: The step is already complete and ``overwrite`` is False.
            SaveInProgressError: The last save is still running and ``if_busy`` is ``"error"``.
            RankError: Another rank failed or is missing, or this rank has no process group.
            UnsupportedStateError: A leaf cannot be stored; the message names it.
            PenstockError: The error of the last save, if it has not been raised yet.

        Example:
            >>> import numpy as np, penstock, tempfile
            >>> with penstock.CheckpointStore(tempfile.mkdtemp()) as store:
            ...     for step in range(3):
            ...         pending = store.save_async(step, {"w": np.full(3, step)})
            >>> store.steps()
            [0, 1, 2]
        """
        destination = self._destination(step, metadata, overwrite, groups, files)
        return self._saver._save_async(
            destination, state, lazy=lazy, if_busy=if_busy, after=self._after_save
        )

    def due(self, step: int) -> bool:
        """Returns whether to save after a step, by the ``save_every`` of the store.

        With ``save_every="auto"`` the number of steps follows from what saves of this run cost and
        how long a step takes, both measured, and from the failure rate: the interval that loses
        least time (`penstock.planning.best_period`), at least as long as a save takes, at most
        ``save_seconds_max`` once it is measured. Before, saves are 20 steps apart: the first two,
        among several ranks the first three or four. `SaveReport.choices` gives the number and its
        reason.

        All ranks call this after every step, and get the same answer without communicating: rank 0
        measures, and its number of steps travels with the saves. An answer True counts as a save:
        if that save is left out or fails, the next one is due after as many steps again. Among
        several ranks, with ``"auto"``, an answer True waits for the save of the second last one,
        if it still runs because the save between was left out, as by ``if_busy="skip"``.

        Args:
            step: The training step.

        Raises:
            ValueError: The store has no ``save_every``.
            RankError: That save has not ended within three ``rank_timeout_seconds``.

        Example:
            >>> import numpy as np, penstock, tempfile
            >>> store = penstock.CheckpointStore(tempfile.mkdtemp(), save_every=10)
            >>> for step in range(1, 31):
            ...     if store.due(step):
            ...         report = store.save(step, {"w": np.full(3, step)})
            >>> store.steps()
            [10, 20, 30]
        """
        return self._run.due(check_step(step), is_saving=self._saver._last.is_running)

    def wait(self) -> None:
        """Waits for the last `save_async`, if one is running.

        Raises:
            PenstockError: The error of that save, if it has not been raised yet.
        """
        self._saver.wait()

    def close(self) -> None:
        """Waits for the last `save_async`, releases its memory, and stops copying to the mirror.

        The store stays usable. Steps that are not mirrored yet are sent when copying starts again,
        in any process: `wait_for_mirror` waits for all of them.

        Raises:
            PenstockError: The error of that save, if it has not been raised yet.
        """
        try:
            self._saver.close()
        finally:
            error, self._error = self._error, None
            self._run.close(error)
            self._mirrored.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._error = error
        super().__exit__(kind, error, trace)

    def _destination(
        self,
        step: int,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        groups: Mapping[str, str] | None,
        files: Files | None,
    ) -> Destination:
        self._mirrored.check_sealable(step, has_groups=bool(groups), has_files=bool(files))
        return Destination.of(
            self.path(step),
            step=step,
            metadata=metadata,
            overwrite=overwrite,
            groups=groups,
            files=files,
            store=self._native,
            sealing=self._sealing,
            signing=self._signing,
            lineage=self._lineage,
        )

    def _after_save(self, report: SaveReport) -> None:
        """Deletes steps by the retention rules, and starts the copy of the new step."""
        step = report.step or 0
        with span("retire"):
            self._retire(step)
        self._mirrored.saved(step)

    def _ranks(self) -> Ranks | None:
        """Returns the ranks that load together."""
        return self._saver._ranks(to_save=False)

    def latest(self) -> int | None:
        """Returns the newest complete step that is not known to be damaged; None if there is none.

        With a mirror, the newest of both; if the mirror is unreachable, the newest local step.
        Damage is known if `load`, `verify` or `scrub` found it and no later verification succeeded.
        A `load` without a step ignores this knowledge: it reads the newest complete step, and its
        damage is an error each time, until ``fallback=True`` or a new save quarantines the step.
        """
        return self._mirrored.newest_complete()

    def mirror_status(self) -> MirrorStatus:
        """Returns the state of copying steps to the mirror, in this process.

        Among many ranks, rank 0 copies.

        Raises:
            PenstockError: The store has no mirror.
        """
        return self._mirrored.follower.status()

    def wait_for_mirror(self, timeout_seconds: float | None = None) -> bool:
        """Waits until all complete steps that are due are at the mirror.

        Also copies steps that an earlier process left. Steps that cannot be copied
        (`MirrorStatus.refused`) are not waited for.

        Args:
            timeout_seconds: Longest wait, in seconds; None for no limit.

        Returns:
            Whether all due steps are mirrored or refused.

        Raises:
            PenstockError: The store has no mirror.
        """
        return self._mirrored.follower.wait(timeout_seconds)

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
        not_before: str | None = None,
    ) -> Any:
        """Loads the newest complete step, or the given one.

        Ranks that use the store together all call this without ``step``, or with ``fallback``, and
        load the same step, which rank 0 finds; see `penstock.load`.

        Steps that were never finished are skipped. Damaged steps, and salvaged ones, are skipped
        with a `PenstockWarning` that gives the reason. Damage that is found only while data is read
        is an error, because resuming from older weights is the caller's decision; ``fallback=True``
        allows it. A newest step that the operating system cannot read is also an error, because it
        may be good. Older unreadable steps are ignored.

        Args:
            step: The training step; None for the newest complete one.
            into: A state to fill; see `penstock.load`. With ``fallback``, targets that a bad step
                filled in part are filled completely by the good one.
            keys: Leaves to load; see `penstock.load`. Only their bytes are checked.
            device: The device of new tensors; see `penstock.load`.
            fallback: Return to the newest step that proves good, starting at ``step`` if given;
                digests are checked whatever the options say. Each skipped step causes a
                `PenstockWarning` and is listed in the report's ``skipped``, including steps that
                the user may not read. A step that requires a newer Penstock is still an error, and
                so is a sealed one that somebody has tampered with. Once
                a good step is found, damaged ones are quarantined if the store is writable; see
                `quarantine`.
            allow_partial: Load the available leaves of a salvaged ``step``; see `penstock.load`.
                Only a given step can be partial.
            progress: True for a bar, or a function called with the bytes done and the total bytes.
            report: Called with the `LoadReport` when the state is complete.
            plain: Load values of classes as their stored members; see `penstock.load`.
            not_before: The id of a checkpoint, as `SaveReport.checkpoint_id` gives it: any step but
                that one and those that list it among their former ones is refused. The list is
                part of sealed and signed steps, so the store needs ``sealing``, ``identities`` or
                ``signed_by``. It reaches back 144 saves. None for any step.

        Raises:
            CheckpointNotFoundError: There is no complete step, or not the given one.
            IncompleteCheckpointError: The save of the given step never finished.
            PartialCheckpointError: The given step was salvaged, and ``allow_partial`` is False.
            CorruptCheckpointError: Data is damaged; the message names the step to return to. With
                ``fallback``: steps exist, or were quarantined, and none is good.
            TamperedError: Somebody without the key has changed a sealed step.
            SignatureError: None of ``signed_by`` has signed the step, or a file is not the signed
                one.
            OtherCheckpointError: The step is older than ``not_before``, or of another line.
            ValueError: ``not_before`` is no id, or the store takes steps that anybody can write.
            FormatVersionError: A newer Penstock wrote it.
            StateMismatchError: A key matches nothing, or ``into`` does not fit.
            DeviceError: A GPU or its driver failed; see `penstock.load`.
            RankError: Another rank did not call this.
            StorageError: The operating system failed an operation.
        """
        ranks = self._ranks()
        request = LoadRequest(
            into=into,
            keys=check_patterns(keys),
            device=device,
            progress=progress,
            allow_partial=bool(allow_partial),
            own_rank=None if ranks is None else ranks.rank,
            is_plain=bool(plain),
            unsealing=self._unsealing,
            not_before=self._check_not_before(not_before),
        )
        last = None if step is None else check_step(step)
        return self._load(ranks, last, request, fallback=fallback, report=report)

    def resume(
        self,
        training: Training,
        *,
        strict: bool = True,
        progress: bool | Progress = False,
        report: Callable[[LoadReport], object] | None = None,
        not_before: str | None = None,
    ) -> int | None:
        """Restores a training from the newest good step.

        A step that is damaged or unreadable is skipped for an older one, with a `PenstockWarning`
        that gives the reason; if one rank finds a step bad, all ranks skip it. The training is
        changed only after a whole step was read and compared. Later saves may use any step number.

        Ranks that use the store together all call this, with the same parts. Their number may
        differ from that of the ranks that saved.

        Args:
            training: The training to restore; in a fresh process, built as for a new run.
            strict: Whether the checkpoint and the training must have the same parts. If False, only
                their common parts are restored.
            progress: True for a bar, or a function called with the bytes done and the total bytes.
            report: Called with the `LoadReport` when the training is restored.
            not_before: The id of a checkpoint that the step must be or come after; see `load`.

        Returns:
            The step, or None if the store has no step and the run is new.

        Raises:
            CheckpointNotFoundError: The store has no step, and ``not_before`` says that it had one.
            CorruptCheckpointError: Steps exist, or were quarantined, and none is good.
            FormatVersionError: A newer Penstock wrote the newest step.
            StateMismatchError: The training does not fit the checkpoint.
            OtherCheckpointError: The step is older than ``not_before``, or of another line.
            RankError: Another rank did not call this, or could not restore the step.
            StorageError: The operating system failed an operation.
            PenstockError: The error of the last save, if it has not been raised yet.

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
        # A lazy save may still be copying the training, so it must not change yet.
        self.wait()
        ranks = self._ranks()
        request = LoadRequest(
            into=training,
            progress=progress,
            own_rank=None if ranks is None else ranks.rank,
            is_strict=bool(strict),
            unsealing=self._unsealing,
            not_before=self._check_not_before(not_before),
        )
        reports: list[LoadReport] = []
        try:
            self._load(ranks, None, request, fallback=True, report=reports.append)
        except CheckpointNotFoundError:
            if not_before is not None:
                raise
            return None
        self._saver._last.restored(reports[0].step)
        seconds = to_native(self._options)["rank_timeout_seconds"]
        self._run.resumed(reports[0].step, ranks, seconds)
        if report is not None:
            report(reports[0])
        return reports[0].step

    def _check_not_before(self, not_before: str | None) -> str | None:
        """Refuses an id that steps of anybody could list."""
        check_expected(not_before, "not_before")
        if not_before is not None and not self._unsealing.refuses_some:
            raise ValueError(
                "not_before: whoever writes to the storage can write the list of a step that is "
                "neither sealed nor signed; give the store sealing=, identities= or signed_by="
            )
        return not_before

    def _load(
        self,
        ranks: Ranks | None,
        last: int | None,
        request: LoadRequest,
        *,
        fallback: bool,
        report: Callable[[LoadReport], object] | None,
    ) -> Any:
        def loaded(found: LoadReport) -> None:
            is_newest = fallback or last is None
            former = found.previous
            self._lineage.loaded(found.step, found.checkpoint_id, former, is_newest=is_newest)
            self._run.restored(found.step, found.seconds)
            if report is not None:
                report(found)

        return restore.load(
            self._mirrored.reader(ranks, fallback=fallback),
            ranks,
            last,
            request,
            where=self._root if last is None else self.path(last),
            fallback=fallback,
            report=loaded,
            stacklevel=4,
        )
