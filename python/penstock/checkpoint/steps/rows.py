"""Rows of a store's listings."""

from __future__ import annotations

from typing import NamedTuple


class StepInfo(NamedTuple):
    """One step of a store, in any state.

    Attributes:
        step: The training step.
        state: ``"complete"``, ``"incomplete"`` (its save never finished, or is still running),
            ``"damaged"`` (its manifest is unreadable, or files are missing or have the wrong size),
            ``"partial"`` (it was salvaged from a damaged step), ``"newer"`` (it requires a newer
            Penstock) or ``"unreadable"`` (the operating system cannot read it, so its state is
            unknown).
        reason: Why it is not complete, where known.
    """

    step: int
    state: str
    reason: str | None


class Mark(NamedTuple):
    """The outcome of verifying a step.

    Attributes:
        read_at_seconds: The time of the read, in seconds since 1970; 0 if unknown.
        is_good: Whether all digests matched.
    """

    read_at_seconds: int
    is_good: bool


class Orphan(NamedTuple):
    """Files that a dead save left behind and a sweep removed."""

    path: str
    bytes: int


class QuarantinedStep(NamedTuple):
    """A damaged step that was quarantined and kept for salvage.

    A step that is known to be damaged is renamed within its store, to ``damaged-N-M``, when a load
    falls back to an older step, or when the step is saved again. `penstock.explain`,
    `penstock.salvage` and `penstock.verify` accept its new path.
    """

    step: int
    path: str


class Succession(NamedTuple):
    """How a complete step follows the step before it, by the ids in its manifest.

    Attributes:
        step: The training step.
        checkpoint_id: Identity of its checkpoint.
        previous: Ids of the checkpoints that its writer knew before it, newest first.
        state: ``"follows"``: it lists the step before as its newest former one. ``"gap"``: it lists
            that step further back, so steps between were deleted or failed. ``"begins"``: it is
            the oldest step, or it lists none, as steps do that are neither sealed nor signed.
            ``"breaks"``: it lists others and not the step before, which was replaced since or
            saved by another run.
    """

    step: int
    checkpoint_id: str
    previous: tuple[str, ...]
    state: str

    @classmethod
    def of(cls, rows: list[tuple[int, str, list[str]]]) -> list[Succession]:
        """Compares each step with the one before.

        Args:
            rows: Steps, ids and former ids, oldest step first.
        """
        found: list[Succession] = []
        for step, checkpoint_id, previous in rows:
            before = found[-1].checkpoint_id if found else None
            if before is None or not previous:
                state = "begins"
            elif before not in previous:
                state = "breaks"
            else:
                state = "follows" if previous[0] == before else "gap"
            found.append(cls(step, checkpoint_id, tuple(previous), state))
        return found
