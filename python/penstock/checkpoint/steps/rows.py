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
