"""What copying to a mirror did, and how it stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReport:
    """What the copying of one checkpoint did.

    Attributes:
        path: The checkpoint.
        url: Its copy.
        checkpoint_id: The identity of both.
        bytes: Bytes of all files of the copy.
        sent_bytes: Those that were sent now; the others were there.
        files: Files of the copy.
        seconds: Time it took.
    """

    path: str
    url: str
    checkpoint_id: str
    bytes: int
    sent_bytes: int
    files: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """How the copying of a store's steps stands, in this process.

    Attributes:
        url: The mirror.
        mirrored: Steps that this process knows to be complete there, oldest first.
        waiting: Complete local steps that are still to be copied, oldest first.
        refused: Steps that cannot be copied as they are, with the reason: damaged here, or another
            checkpoint is there. The mirror is asked again after each save, and by
            `wait_for_mirror`.
        step: The step that is being sent; None if none is.
        sent_bytes: Bytes of it that are there.
        total_bytes: Bytes of it in all.
        failures: Attempts in a row that have failed; they are repeated, less and less often.
        last_error: What the last of them, or the last refusal, said; None if there was none.
    """

    url: str
    mirrored: tuple[int, ...]
    waiting: tuple[int, ...]
    refused: dict[int, str]
    step: int | None
    sent_bytes: int
    total_bytes: int
    failures: int
    last_error: str | None
