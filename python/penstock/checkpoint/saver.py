"""`Saver`: saves checkpoints to any paths one after another, also in the background."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from penstock import _native
from penstock.checkpoint.loading.path_kind import check_no_store
from penstock.checkpoint.ranks.group import entered_round
from penstock.checkpoint.ranks.group import find as find_ranks
from penstock.checkpoint.ranks.node_ranks import processes_here
from penstock.checkpoint.saving.blocking import save_and_wait
from penstock.checkpoint.saving.destination import Destination
from penstock.checkpoint.saving.guard import guard_all
from penstock.checkpoint.saving.last_save import LastSave
from penstock.checkpoint.saving.pending import PendingSave
from penstock.checkpoint.saving.save import Save
from penstock.checkpoint.view.live import LiveState
from penstock.common.events import observed
from penstock.common.paths import absolute
from penstock.common.tracing import call
from penstock.errors import PenstockError, SaveInProgressError
from penstock.sealing.sealing import check_sealing
from penstock.signing import SigningKeys
from penstock.tensors.arguments import decode_path, to_native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.distributed import ProcessGroup

    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.ranks.round import Round
    from penstock.checkpoint.saving.groups import Files
    from penstock.checkpoint.steps.paced_run import PacedRun
    from penstock.common.progress import Progress
    from penstock.options import Options
    from penstock.reports import SaveReport
    from penstock.sealing import Sealing
    from penstock.signing import SignatureKey


class Closing(ABC):
    """An object whose ``with`` block ends by `close`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the object's background work."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except PenstockError as failed:
            if error is None:
                raise
            # The error that ended the block takes precedence.
            error.add_note(f"and a save in the background failed: {failed}")


class Saver(Closing):
    """Saves to paths that the caller chooses, each durable before the next save begins.

    A `CheckpointStore` names its directories and deletes old ones itself; a framework that does
    both uses a `Saver`. The saver keeps its staging memory from save to save until `close`.

    Args:
        options: How bytes move; None for ``Options()``.
        process_group: The ranks that save together, if `torch.distributed` is initialized; None for
            all ranks. All of them call `save` and `save_async` in the same order.
        no_dist: Save without other ranks.
        sealing: For whom each checkpoint is sealed; see `penstock.save`. None for clear ones.
        sign: Private keys that sign each checkpoint while it is saved; see `penstock.save`. None
            for none.

    Attributes:
        sealing: For whom later saves are sealed.
        signing: The keys that sign later saves.

    Raises:
        ValueError: An argument is out of range.
        TypeError: ``sealing`` is no `Sealing`.
        KeyFileError: A text or a file of ``sign`` is no private key that signs.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> root = tempfile.mkdtemp()
        >>> with penstock.Saver() as saver:
        ...     for epoch in range(3):
        ...         pending = saver.save_async(f"{root}/epoch={epoch}", {"w": np.full(3, epoch)})
        >>> penstock.load(f"{root}/epoch=2")["w"]
        array([2, 2, 2])
    """

    def __init__(
        self,
        *,
        options: Options | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        sealing: Sealing | None = None,
        sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
    ) -> None:
        to_native(options)
        check_sealing(sealing)
        self._options = options
        self._process_group = process_group
        self._no_dist = no_dist
        self.sealing = sealing
        self.signing = SigningKeys.resolve(sign)
        self._last = LastSave()
        self._arena: _native.Arena | None = None
        self._process = os.getpid()
        self._run: PacedRun | None = None

    def save(
        self,
        path: str | os.PathLike[str] | bytes,
        state: Any,
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        progress: bool | Progress = False,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> SaveReport:
        """Waits for the current save, then saves as `penstock.save` does.

        Raises:
            PenstockError: The error of the last save, if it has not been raised yet, or any error
                of `penstock.save`.
        """
        destination = self._destination(path, step, metadata, overwrite, groups, files)
        return self._save(destination, state, progress)

    @overload
    def save_async(
        self,
        path: str | os.PathLike[str] | bytes,
        state: Any,
        *,
        lazy: bool = False,
        if_busy: Literal["wait", "error"] = "wait",
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        after: Callable[[], None] | None = None,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> PendingSave: ...
    @overload
    def save_async(
        self,
        path: str | os.PathLike[str] | bytes,
        state: Any,
        *,
        lazy: bool = False,
        if_busy: Literal["skip"],
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        after: Callable[[], None] | None = None,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> PendingSave | None: ...
    def save_async(
        self,
        path: str | os.PathLike[str] | bytes,
        state: Any,
        *,
        lazy: bool = False,
        if_busy: Literal["wait", "skip", "error"] = "wait",
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        after: Callable[[], None] | None = None,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> PendingSave | None:
        """Saves a state in the background, as `CheckpointStore.save_async` does.

        Args:
            path: The checkpoint's directory; created if missing, with its parents.
            state: What to save; see `penstock.save`.
            lazy: Whether to copy the state after the call; it must not change before
                `PendingSave.stage`.
            if_busy: Policy while the last save is still running: ``"wait"`` for it, ``"skip"`` this
                save and return None, or raise an ``"error"``. All ranks pass the same policy.
            step: The training step, stored with the state.
            metadata: A note of plain JSON.
            overwrite: Replace a complete checkpoint at the path.
            after: Called in the saving thread once the checkpoint is durable, among many ranks on
                the first only. Use it to delete old checkpoints. Its exceptions are ignored.
            groups: Tensors that readers of models shall find; see `penstock.save`.
            files: Small files stored beside the shards; see `penstock.save`.

        Raises:
            CheckpointExistsError: A complete checkpoint exists and ``overwrite`` is False.
            SaveInProgressError: The last save is still running and ``if_busy`` is ``"error"``.
            RankError: Another rank failed or is missing, or this rank has no process group.
            UnsupportedStateError: A leaf cannot be stored; the message names it.
            PenstockError: The error of the last save, if it has not been raised yet.
        """
        return self._save_async(
            self._destination(path, step, metadata, overwrite, groups, files),
            state,
            lazy=lazy,
            if_busy=if_busy,
            after=None if after is None else lambda _: after(),
        )

    def wait(self) -> None:
        """Waits for the last `save_async`, if one is running.

        Raises:
            PenstockError: The error of that save, if it has not been raised yet.
        """
        self._last.wait()

    def close(self) -> None:
        """Waits for the last `save_async` and releases its memory; this object stays usable.

        Raises:
            PenstockError: The error of that save, if it has not been raised yet.
        """
        try:
            self.wait()
        finally:
            arena, self._arena = self._arena, None
            if arena is not None:
                # A `PendingSave` that is kept also keeps the arena.
                arena.release()

    def record(self, run: PacedRun | None) -> None:
        """Records the times of later saves in a run, for plug-ins; see `penstock.plugin.PacedRun`.

        Args:
            run: The run; None for no record.
        """
        self._run = run

    def _destination(
        self,
        path: str | os.PathLike[str] | bytes,
        step: int | None,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        groups: Mapping[str, str] | None,
        files: Files | None,
    ) -> Destination:
        # The path is made absolute: a later change of the working directory must not move the save.
        where = absolute(decode_path(path))
        check_no_store(where)
        return Destination.of(
            where,
            step=step,
            metadata=metadata,
            overwrite=overwrite,
            groups=groups,
            files=files,
            sealing=self.sealing,
            signing=self.signing,
        )

    # The course of every save: `penstock.save` and `CheckpointStore` begin here.

    @observed("save")
    def _save(
        self,
        destination: Destination,
        state: Any,
        progress: bool | Progress,
        after: Callable[[SaveReport], None] | None = None,
    ) -> SaveReport:
        """Saves, and waits; ``after`` is called on the committing rank after the commit."""
        after = self._recorded(_CallTime(), after)
        with call("stall", "save", destination.path):
            options = to_native(self._options)
            with self._next_round(destination, "wait", options) as (save_round, _):
                report = save_and_wait(destination, state, save_round, options, progress)
            self._last.saved(report)
            if after is not None and (save_round is None or save_round.is_coordinator):
                after(report)
        return report

    def _save_async(
        self,
        destination: Destination,
        state: Any,
        *,
        lazy: bool,
        if_busy: str,
        after: Callable[[SaveReport], None] | None,
    ) -> PendingSave | None:
        """Starts a background save; returns None if it is skipped. See `save_async`."""
        if if_busy not in ("wait", "skip", "error"):
            raise ValueError(f"if_busy={if_busy!r}: must be one of 'wait', 'skip', 'error'")
        stall = _CallTime()
        with call("stall", "save_async", destination.path):
            after = self._recorded(stall, after)
            pending = self._begin(destination, state, lazy, if_busy, after)
        stall.end()
        return pending

    def _recorded(
        self, stall: _CallTime, after: Callable[[SaveReport], None] | None
    ) -> Callable[[SaveReport], None] | None:
        """Returns a function for after a save, which also records its times in the run."""
        run = self._run
        if run is None:
            return after

        def committed(report: SaveReport) -> None:
            if after is not None:
                after(report)
            # No failure of it fails a save that is committed.
            with contextlib.suppress(Exception):
                run.saved(report, stall.seconds)

        return committed

    @observed("save")
    def _begin(
        self,
        destination: Destination,
        state: Any,
        lazy: bool,
        if_busy: str,
        after: Callable[[SaveReport], None] | None,
    ) -> PendingSave | None:
        began = time.perf_counter()
        options = to_native(self._options)
        if lazy and isinstance(state, LiveState):
            guard_all(state._optimizers())
        with self._next_round(destination, if_busy, options) as (save_round, is_left_out):
            if is_left_out:
                return None
            if save_round is None and not destination.overwrite:
                destination.check_free()
            save = Save(
                destination,
                state,
                options=options,
                save_round=save_round,
                arena=self._memory(options["staging_bytes"], save_round),
                lazy=lazy,
                watches=True,
            )
            # Determined now: the process group may be destroyed by the end.
            is_keeper = save_round is None or save_round.is_coordinator
            pending = PendingSave(save, lazy=save.is_lazy, after=after if is_keeper else None)
        try:
            self._last.pending = pending
            if not save.is_lazy:
                pending.stage()
        except BaseException:
            # After a Ctrl-C the caller has nothing to wait for.
            pending.is_reported = True
            pending.cancel()
            raise
        pending.stall_seconds = time.perf_counter() - began
        return pending

    @contextlib.contextmanager
    def _next_round(
        self, destination: Destination, if_busy: str, options: dict[str, Any]
    ) -> Iterator[tuple[Round | None, bool]]:
        """Waits for the current save, and lets all ranks begin the next one, or none.

        Yields:
            The round of the ranks, if there are others, and whether this save is skipped. If the
                block raises, the save fails on the other ranks too.
        """
        ranks = self._ranks(to_save=True)
        if ranks is None:
            yield None, self._is_left_out(None, destination, if_busy)
            return

        def enter() -> Round:
            try:
                timeout_seconds = options["rank_timeout_seconds"]
                return ranks.enter(destination.label, timeout_seconds, destination.step)
            except PenstockError:
                # Other ranks came first and failed, perhaps for the error that this rank also has.
                if if_busy == "wait" or not self._last.is_running:
                    self.wait()
                raise

        with entered_round(enter) as save_round:
            yield save_round, self._is_left_out(save_round, destination, if_busy)

    def _is_left_out(
        self, save_round: Round | None, destination: Destination, if_busy: str
    ) -> bool:
        """Waits for the current save, unless the next one is skipped because of it."""
        if if_busy == "wait" or not self._is_busy(save_round):
            self.wait()
            if self._run is not None:
                self._run.entered(save_round)
            return False
        if save_round is not None:
            save_round.leave()
        if if_busy == "error":
            pending = self._last.pending
            # Another rank may still be busy with a save that has ended here.
            path = os.path.dirname(destination.path) if pending is None else pending.path
            raise SaveInProgressError(
                f"{path} is still being saved: wait for it (if_busy='wait'), leave this one out "
                "('skip'), or save less often",
                path=path,
            )
        return True

    def _is_busy(self, save_round: Round | None) -> bool:
        is_running = self._last.is_running
        if save_round is None:
            return is_running
        if not save_round.is_coordinator:
            return save_round.wait_busy()
        save_round.post_busy(is_running)
        return is_running

    def _ranks(self, *, to_save: bool) -> Ranks | None:
        """Returns the ranks that act together with this process; None if it acts alone."""
        return find_ranks(self._process_group, no_dist=self._no_dist, to_save=to_save)

    def _memory(self, staging_bytes: int | None, save_round: Round | None) -> _native.Arena:
        """Returns the staging memory, which is kept between saves."""
        if self._arena is None or self._process != os.getpid():
            sharers = processes_here() if save_round is None else save_round.processes_here()
            # A fork cannot reclaim the parent's memory that a save of the parent is using.
            self._arena = _native.Arena(staging_bytes, sharers or 1)
            self._process = os.getpid()
        return self._arena


class _CallTime:
    """Time for which a call stops training; runs until `end`."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ended: float | None = None

    def end(self) -> None:
        """Ends the time."""
        self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of the call, until now if it has not returned."""
        return (self._ended or time.perf_counter()) - self._began
