"""`SaveQueue`: runs the saves of one store one after another."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Self

from penstock import _native
from penstock.checkpoint.ranks.entering import entered_round
from penstock.checkpoint.ranks.node_ranks import processes_here
from penstock.checkpoint.saving.guard import guard_all
from penstock.checkpoint.saving.pending import PendingSave
from penstock.checkpoint.saving.save import Save
from penstock.checkpoint.view.live import LiveState
from penstock.common.events import observed
from penstock.errors import PenstockError, SaveInProgressError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.ranks.round import Round
    from penstock.checkpoint.saving.destination import Destination
    from penstock.reports import SaveReport


class SaveQueue:
    """The order of saves: the current one, the previous one, and their common staging memory.

    Args:
        root: The store's directory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._pending: PendingSave | None = None
        self._last_report: SaveReport | None = None
        self._last_step: int | None = None
        self._arena: _native.Arena | None = None
        self._process = os.getpid()

    @property
    def pending(self) -> PendingSave | None:
        """The last background save, unless it was already waited for here."""
        return self._pending

    @property
    def last_seconds(self) -> float:
        """Duration of the last save; 0 if there was none."""
        pending = self._pending
        report = None if pending is None else pending.report
        report = report or self._last_report
        return 0.0 if report is None else report.seconds

    def covers(self, step: int) -> bool:
        """Whether the last save or restore was that of a step.

        The save may still be running.
        """
        pending = self._pending
        if pending is not None and not (pending.done() and pending.report is None):
            return pending.step == step
        return self._last_step == step

    def saved(self, report: SaveReport) -> None:
        """Records a finished blocking save."""
        self._last_report, self._last_step = report, report.step

    def restored(self, step: int | None) -> None:
        """Records the step that the state was restored to."""
        self._last_step = step

    def wait(self) -> None:
        """Waits for the current save."""
        pending, self._pending = self._pending, None
        if pending is None or not pending.is_ours:
            return
        try:
            pending.wait_unseen()
            if pending.report is not None:
                self.saved(pending.report)
        except BaseException:
            if not pending.done():
                # After a Ctrl-C the save is still running.
                self._pending = pending
            raise

    def close(self) -> None:
        """Waits for the current save and releases the memory."""
        try:
            self.wait()
        finally:
            arena, self._arena = self._arena, None
            if arena is not None:
                # A `PendingSave` that is kept also keeps the arena.
                arena.release()

    @contextlib.contextmanager
    def next_round(
        self, ranks: Ranks | None, destination: Destination, if_busy: str, timeout_seconds: float
    ) -> Iterator[tuple[Round | None, bool]]:
        """Waits for the current save, and lets all ranks begin the next one, or none.

        Args:
            ranks: The ranks that save; None for this process alone.
            destination: The destination.
            if_busy: The policy while a save is running: ``"wait"``, ``"skip"`` or ``"error"``.
            timeout_seconds: Longest wait for another rank, in seconds.

        Yields:
            The round of the ranks, if there are others, and whether this save is skipped. If the
                block raises, the save fails on the other ranks too.
        """
        if ranks is None:
            yield None, self._is_left_out(None, if_busy)
            return

        def enter() -> Round:
            try:
                return ranks.enter(destination.label, timeout_seconds, destination.step)
            except PenstockError:
                # Other ranks came first and failed, perhaps for the error that this rank also has.
                if if_busy == "wait" or not self._is_saving():
                    self.wait()
                raise

        with entered_round(enter) as save_round:
            yield save_round, self._is_left_out(save_round, if_busy)

    def _is_left_out(self, save_round: Round | None, if_busy: str) -> bool:
        """Waits for the current save, unless the next one is skipped because of it."""
        if if_busy == "wait" or not self._is_busy(save_round):
            self.wait()
            return False
        if save_round is not None:
            save_round.leave()
        if if_busy == "error":
            raise self._busy()
        return True

    def _is_saving(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def _is_busy(self, save_round: Round | None) -> bool:
        is_busy = self._is_saving()
        if save_round is None:
            return is_busy
        if not save_round.is_coordinator:
            return save_round.wait_busy()
        save_round.post_busy(is_busy)
        return is_busy

    def _busy(self) -> SaveInProgressError:
        path = self._root if self._pending is None else self._pending.path
        return SaveInProgressError(
            f"{path} is still being saved: wait for it (if_busy='wait'), leave this one out "
            "('skip'), or save less often",
            path=path,
        )

    @observed("save")
    def save_async(
        self,
        find: Callable[[], Ranks | None],
        destination: Destination,
        state: Any,
        options: dict[str, Any],
        *,
        lazy: bool,
        if_busy: str,
        after: Callable[[], None],
    ) -> PendingSave | None:
        """Starts a background save.

        Args:
            find: Returns the ranks that save; None for this process alone.
            destination: The destination.
            state: The state.
            options: How bytes move, in the form that the native module takes.
            lazy: Whether to copy the state after the call.
            if_busy: See `next_round`.
            after: Called on the committing rank after the commit.

        Returns:
            The save; None if it is skipped.
        """
        began = time.perf_counter()
        if lazy and isinstance(state, LiveState):
            guard_all(state._optimizers())
        seconds = options["rank_timeout_seconds"]
        with self.next_round(find(), destination, if_busy, seconds) as (save_round, is_left_out):
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
            pending = PendingSave(save, lazy=save.is_lazy, after=after if is_keeper else _nothing)
        try:
            self._pending = pending
            if not save.is_lazy:
                pending.stage()
        except BaseException:
            # After a Ctrl-C the caller has nothing to wait for.
            pending.is_reported = True
            pending.cancel()
            raise
        pending.stall_seconds = time.perf_counter() - began
        return pending

    def _memory(self, staging_bytes: int | None, save_round: Round | None) -> _native.Arena:
        """Returns the staging memory, which is kept between saves."""
        if self._arena is None or self._process != os.getpid():
            sharers = processes_here() if save_round is None else save_round.processes_here()
            # A fork cannot reclaim the parent's memory that a save of the parent is using.
            self._arena = _native.Arena(staging_bytes, sharers or 1)
            self._process = os.getpid()
        return self._arena


def _nothing() -> None:
    pass


class BackgroundSaver:
    """Runs one save at a time, perhaps in the background; a ``with`` block ends by waiting."""

    _save_queue: SaveQueue

    def wait(self) -> None:
        """Waits for the last `save_async`, if one is running.

        Raises:
            PenstockError: The error of that save, if it has not been raised yet.
        """
        self._save_queue.wait()

    def close(self) -> None:
        """Waits for the last `save_async` and releases its memory; this object stays usable.

        Raises:
            PenstockError: The error of that save, if it has not been raised yet.
        """
        self._save_queue.close()

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
