"""`PacedRun`: one run that saves: when its saves are due, and the history of their times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.checkpoint.steps.pace import Pace
from penstock.checkpoint.steps.run_history import RunHistory

if TYPE_CHECKING:
    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.ranks.round import Round
    from penstock.checkpoint.steps.pace import Agree
    from penstock.reports import SaveReport


class PacedRun:
    """One run that saves into a directory.

    It decides when saves are due, and keeps the directory's history, `docs/format.md`, section 8.
    `CheckpointStore` has one. A plug-in whose framework names the checkpoints gives its `Saver`
    one, by `Saver.record`, and asks `due` after every step.

    Args:
        root: The directory of the run's checkpoints; it has the history.
        save_every: Steps between two saves, or ``"auto"``; None if `due` is not asked.
        failures_per_hour: Failures of the whole job, for ``"auto"``; see `CheckpointStore`.
        save_seconds_max: With ``"auto"``, the longest time between two saves.
        agree: Gives all ranks the first rank's result of a function. All ranks call it when a save
            is due. None if ranks save together through a `CheckpointStore`, whose saves carry the
            number of steps.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> from penstock.plugin import PacedRun
        >>> root = tempfile.mkdtemp()
        >>> run, saver = PacedRun(root, save_every=10), penstock.Saver()
        >>> saver.record(run)
        >>> for step in range(1, 31):
        ...     if run.due(step, is_saving=False):
        ...         report = saver.save(f"{root}/step-{step}", {"w": np.ones(3)}, step=step)
        >>> run.close()
        >>> report.step
        30
    """

    def __init__(
        self,
        root: str,
        save_every: int | Literal["auto"] | None = None,
        *,
        failures_per_hour: float | None = None,
        save_seconds_max: float = 3600.0,
        agree: Agree | None = None,
    ) -> None:
        self._history = RunHistory(root)
        self._pace: Pace | None = None
        if save_every is not None:
            self._pace = Pace(
                save_every,
                failures_per_hour=failures_per_hour,
                seconds_max=save_seconds_max,
                root=root,
                agree=agree,
            )

    def due(self, step: int, *, is_saving: bool) -> bool:
        """Returns whether to save after a step; the same on all ranks.

        Args:
            step: The training step.
            is_saving: Whether a background save is running.

        Raises:
            ValueError: There is no ``save_every``.
            RankError: The save of the second last answer neither ends nor fails.
        """
        if self._pace is None:
            raise ValueError("save_every is None: give CheckpointStore a number of steps or 'auto'")
        return self._pace.due(step, is_saving=is_saving)

    def entered(self, save_round: Round | None) -> None:
        """Handles a save that begins.

        Args:
            save_round: The round of the ranks; None if there are no others.
        """
        if self._pace is not None:
            self._pace.entered(save_round)

    def restored(self, step: int | None, seconds: float) -> None:
        """Notes a load by its step and its time."""
        self._history.restored(step, seconds)

    def resumed(
        self, step: int | None, ranks: Ranks | None = None, timeout_seconds: float = 0.0
    ) -> None:
        """Counts steps from one that was loaded, and goes on as the runs before.

        Args:
            step: The step; None if there was none.
            ranks: The ranks that loaded it, all of which call this; None for this process alone,
                and for ranks that agree by themselves.
            timeout_seconds: Longest wait for the ranks.
        """
        if self._pace is not None:
            self._pace.restored(step, ranks, timeout_seconds)

    def saved(self, report: SaveReport, stall_seconds: float) -> None:
        """Records the times of a save, and finds when the next one is due.

        Args:
            report: The report of the rank that commits.
            stall_seconds: Time for which the call stopped training.
        """
        facts: dict[str, float | None] = {}
        self._history.saving()
        if self._pace is not None:
            self._pace.saved(stall_seconds, report.seconds)
            if self._pace.reason:
                report.choices.append(self._pace.reason)
            facts["step_seconds"] = self._pace.step_seconds
            facts["step_seconds_during"] = self._pace.step_seconds_during
        self._history.saved(report, stall_seconds, facts)

    def close(self, error: BaseException | None = None) -> None:
        """Records the end of the run.

        Args:
            error: The exception that ended it; None for a planned end.
        """
        self._history.close(error)
