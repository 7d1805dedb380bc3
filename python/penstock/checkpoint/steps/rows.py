"""What a store says of its steps, a row each."""

from __future__ import annotations

from typing import NamedTuple


class StepInfo(NamedTuple):
    """One step of a store, whatever its state.

    Attributes:
        step: The training step.
        state: ``"complete"``, ``"incomplete"`` (its save never finished, or is still running),
            ``"damaged"`` (its manifest is unreadable, or files are missing or of a wrong size),
            ``"partial"`` (it holds what was salvaged from a damaged one), ``"newer"`` (it takes
            a newer Penstock to read) or ``"unreadable"`` (the system does not let it be read, so
            nobody knows).
        reason: Why it is not complete, where known.
    """

    step: int
    state: str
    reason: str | None


class Mark(NamedTuple):
    """What came of reading a step back.

    Attributes:
        read_at_seconds: When, in seconds since 1970; 0 where that is not known.
        is_good: Whether every byte had its digest.
    """

    read_at_seconds: int
    is_good: bool


class Orphan(NamedTuple):
    """Something that a save left behind and a sweep removed.

    Attributes:
        path: The directory that something was removed from.
        bytes: How much space that freed.
    """

    path: str
    bytes: int


class SetAside(NamedTuple):
    """A damaged step that was set aside: in nobody's way, and kept for salvage.

    A step that is known to be damaged is renamed within its store, to ``damaged-N-M``, when a load
    has gone back to an older one, or when the step is saved again. `penstock.explain`,
    `penstock.salvage` and `penstock.verify` take its new path.

    Attributes:
        step: The training step that it was.
        path: Where it is now.
    """

    step: int
    path: str
