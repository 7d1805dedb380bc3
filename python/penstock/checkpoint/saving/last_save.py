"""`LastSave`: the last save of a `penstock.Saver`, running or ended, or the last restore."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.checkpoint.saving.pending import PendingSave
    from penstock.reports import SaveReport


class LastSave:
    """The last save, or the restore after it.

    Attributes:
        pending: The last background save, unless it was already waited for here.
        report: The report of the last save that was waited for; None before.
    """

    def __init__(self) -> None:
        self.pending: PendingSave | None = None
        self.report: SaveReport | None = None
        self._step: int | None = None

    @property
    def seconds(self) -> float:
        """Duration of the last save; 0 if there was none."""
        report = None if self.pending is None else self.pending.report
        report = report or self.report
        return 0.0 if report is None else report.seconds

    @property
    def is_running(self) -> bool:
        """Whether a background save of this process is running; a fork has none."""
        return self.pending is not None and self.pending.is_ours and not self.pending.done()

    def covers(self, step: int) -> bool:
        """Whether the last save or restore was that of a step.

        The save may still be running.
        """
        pending = self.pending
        if pending is not None and not (pending.done() and pending.report is None):
            return pending.step == step
        return self._step == step

    def saved(self, report: SaveReport) -> None:
        """Records a finished save."""
        self.report, self._step = report, report.step

    def restored(self, step: int | None) -> None:
        """Records the step that the state was restored to."""
        self._step = step

    def wait(self) -> None:
        """Waits for the running save; raises its error if that was not raised yet."""
        if self.pending is not None:
            # Beforehand, as another thread that waits must still find the save.
            self.pending.check_not_within()
        pending, self.pending = self.pending, None
        if pending is None or not pending.is_ours:
            return
        try:
            pending.wait_unseen()
            if pending.report is not None:
                self.saved(pending.report)
        except BaseException:
            if not pending.done():
                # After a Ctrl-C the save is still running.
                self.pending = pending
            raise
