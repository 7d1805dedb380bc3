"""`Turns`: the saves of one store, one after the other."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.ranks.entering import entered
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


class Turns:
    """Who saves next: the save under way, the one before it, and the memory that both stage in.

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
        """The last save in the background, unless somebody has waited for it here."""
        return self._pending

    @property
    def last_seconds(self) -> float:
        """How long the last save took; 0 where there was none."""
        pending = self._pending
        report = None if pending is None else pending.report
        report = report or self._last_report
        return 0.0 if report is None else report.seconds

    def covers(self, step: int) -> bool:
        """Whether the last save, or what was restored since, is that of a step.

        A save may still be under way.
        """
        pending = self._pending
        if pending is not None and not (pending.done() and pending.report is None):
            return pending.step == step
        return self._last_step == step

    def saved(self, report: SaveReport) -> None:
        """Takes note of a save that somebody has waited for."""
        self._last_report, self._last_step = report, report.step

    def restored(self, step: int | None) -> None:
        """Takes note of the step that the state was brought back to."""
        self._last_step = step

    def wait(self) -> None:
        """Waits for the save under way.

        Raises:
            PenstockError: Its error, if nobody has seen it.
        """
        pending, self._pending = self._pending, None
        if pending is None or not pending.is_ours:
            return
        try:
            pending.wait_unseen()
            if pending.report is not None:
                self.saved(pending.report)
        except BaseException:
            if not pending.done():
                # A Ctrl-C: it is still under way.
                self._pending = pending
            raise

    def close(self) -> None:
        """Waits for the save under way and gives the memory back.

        Raises:
            PenstockError: Its error, if nobody has seen it.
        """
        try:
            self.wait()
        finally:
            arena, self._arena = self._arena, None
            if arena is not None:
                # Whoever keeps a `PendingSave` keeps the arena.
                arena.release()

    @contextlib.contextmanager
    def together(
        self, ranks: Ranks | None, destination: Destination, if_busy: str, timeout_seconds: float
    ) -> Iterator[tuple[Round | None, bool]]:
        """Waits for the save under way, and has all ranks begin the next one or none.

        Args:
            ranks: Who saves; None for this process alone.
            destination: What as.
            if_busy: What to do while a save is under way: ``"wait"``, ``"skip"`` or ``"error"``.
            timeout_seconds: For how long to wait for another rank.

        Yields:
            The round in which they save, if there are any others, and whether this save is left
            out. The others learn of it if it fails under this.

        Raises:
            SaveInProgressError: A save is under way, and that is an error.
            PenstockError: The error of the last save, if nobody has seen it.
        """
        if ranks is None:
            yield None, self._is_left_out(None, if_busy)
            return

        def enter() -> Round:
            try:
                return ranks.enter(destination.label, timeout_seconds, destination.step)
            except PenstockError:
                # Others came first, and gave up for what this rank may have to tell as well.
                if if_busy == "wait" or not self._is_saving():
                    self.wait()
                raise

        with entered(enter) as together:
            yield together, self._is_left_out(together, if_busy)

    def _is_left_out(self, together: Round | None, if_busy: str) -> bool:
        """Waits for the save under way, unless the next one is left out for it."""
        if if_busy == "wait" or not self._is_busy(together):
            self.wait()
            return False
        if together is not None:
            together.leave()
        if if_busy == "error":
            raise self._busy()
        return True

    def _is_saving(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def _is_busy(self, together: Round | None) -> bool:
        is_busy = self._is_saving()
        if together is None:
            return is_busy
        if not together.is_coordinator:
            return together.wait_busy()
        together.post_busy(is_busy)
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
        """Begins a save in the background.

        Args:
            find: Finds out who saves; None for this process alone.
            destination: What as.
            state: What.
            options: How bytes move, as the native module takes it.
            lazy: Whether to copy the state later.
            if_busy: See `together`.
            after: What the one who commits does then.

        Returns:
            The save; None if it is left out.
        """
        began = time.perf_counter()
        if lazy and isinstance(state, LiveState):
            guard_all(state._optimizers())
        seconds = options["rank_timeout_seconds"]
        with self.together(find(), destination, if_busy, seconds) as (together, is_left_out):
            if is_left_out:
                return None
            if together is None and not destination.overwrite:
                destination.check_free()
            save = Save(
                destination,
                state,
                options=options,
                together=together,
                arena=self._memory(options["staging_bytes"], together),
                lazy=lazy,
                watches=True,
            )
            # Said now: the process group may be gone by the end.
            is_keeper = together is None or together.is_coordinator
            pending = PendingSave(save, lazy=save.is_lazy, after=after if is_keeper else _nothing)
        try:
            self._pending = pending
            if not save.is_lazy:
                pending.stage()
        except BaseException:
            # A Ctrl-C: the caller has nothing to wait for.
            pending.is_told = True
            pending.cancel()
            raise
        pending.stall_seconds = time.perf_counter() - began
        return pending

    def _memory(self, staging_bytes: int | None, together: Round | None) -> _native.Arena:
        """Memory to stage in, which outlives a save."""
        if self._arena is None or self._process != os.getpid():
            sharers = processes_here() if together is None else together.processes_here()
            # Of a parent's memory a fork never gets back what a save of the parent has out.
            self._arena = _native.Arena(staging_bytes, sharers or 1)
            self._process = os.getpid()
        return self._arena


def _nothing() -> None:
    pass
