"""`MirrorReport` and `MirrorStatus`: the results and the state of copying to a mirror."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReport:
    """The result of copying one checkpoint.

    Attributes:
        path: The checkpoint.
        url: Its copy.
        checkpoint_id: The identity of both.
        bytes: Bytes of all files of the copy.
        sent_bytes: Bytes sent by this call; the others were already there.
        files: Files of the copy.
        seconds: Wall time of the copy.
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
    """The state of copying a store's steps, in this process.

    Attributes:
        url: The mirror.
        mirrored: Steps that this process knows to be complete at the mirror, oldest first.
        waiting: Complete local steps that are still to be copied, oldest first.
        refused: Steps that cannot be copied, with the reason: the local step is damaged, or the
            mirror has another checkpoint. They are tried again after each save and by
            `wait_for_mirror`.
        step: The step that is being sent; None if none is.
        sent_bytes: Bytes of that step already sent.
        total_bytes: Total bytes of that step.
        failures: Number of consecutive failed attempts; they are repeated at growing intervals.
        last_error: The message of the last failure or refusal; None if there was none.
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
