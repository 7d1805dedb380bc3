"""Verifies checkpoints, and the steps of a store before they are needed."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.loading.leaf_names import problems_of
from penstock.checkpoint.loading.path_kind import describing_contents
from penstock.checkpoint.steps.rows import Mark
from penstock.common.events import notify, observed
from penstock.common.progress import shown
from penstock.common.tracing import call
from penstock.reports import ScrubbedStep, ScrubReport, VerifyResult

if TYPE_CHECKING:
    from penstock.common.progress import Progress


@observed("verify")
def verify_files(
    path: str,
    options: dict[str, Any],
    progress: bool | Progress,
    signers: _native.Signers | None = None,
) -> VerifyResult:
    """Implements `penstock.verify`, with checked arguments."""
    with (
        call("stall", "verify", path),
        shown(progress, "verifying") as update,
        describing_contents(path),
    ):
        fields = _native.verify(path, options=options, progress=update, signers=signers)
    problems = problems_of(path, fields["problems"])
    return VerifyResult(**{**fields, "path": path, "problems": problems})


def marks(store: _native.Store) -> dict[int, Mark]:
    """Returns the recorded outcomes of steps that were verified."""
    return {
        step: Mark(at_seconds, not is_damaged) for step, _, at_seconds, is_damaged in store.marks()
    }


@observed("scrub")
def scrub(
    store: _native.Store,
    root: str,
    *,
    bytes_per_second: int | None,
    max_age_seconds: float | None,
    options: dict[str, Any],
    update: Progress | None,
) -> ScrubReport:
    """Implements `penstock.CheckpointStore.scrub`, with checked arguments."""
    began_seconds = int(time.time())

    def path(step: int) -> str:
        return os.path.join(root, _native.step_directory(step))

    try:
        fields = store.scrub(
            bytes_per_second=bytes_per_second,
            max_age_seconds=max_age_seconds,
            options=options,
            progress=update,
        )
    except BaseException:
        notify(lambda observer: observer.ended("scrub", _since(store, root, began_seconds), 0))
        raise
    steps = tuple(
        ScrubbedStep(**{**row, "problems": problems_of(path(row["step"]), row["problems"])})
        for row in fields["steps"]
    )
    return ScrubReport(root=root, steps=steps, seconds=fields["seconds"])


def _since(store: _native.Store, root: str, began_seconds: int) -> ScrubReport:
    """Reconstructs the report of an interrupted scrub from its marks."""
    steps = tuple(
        ScrubbedStep(
            step=step,
            state="verified" if mark.is_good else "damaged",
            reason=None,
            read_at_seconds=mark.read_at_seconds,
            problems=(),
            bytes_checked=0,
            seconds=0.0,
        )
        for step, mark in marks(store).items()
        if mark.read_at_seconds >= began_seconds
    )
    return ScrubReport(root=root, steps=steps, seconds=0.0)


def check_scrub(bytes_per_second: Any, max_age_seconds: Any) -> None:
    """Checks the arguments of a scrub."""
    if bytes_per_second is not None:
        if type(bytes_per_second) is not int:
            raise TypeError(f"bytes_per_second={bytes_per_second!r}: must be an int or None")
        if not 1 <= bytes_per_second < 1 << 63:
            raise ValueError(
                f"bytes_per_second={bytes_per_second}: must be between 1 and 2**63 - 1"
            )
    if max_age_seconds is not None:
        if type(max_age_seconds) not in (int, float):
            raise TypeError(f"max_age_seconds={max_age_seconds!r}: must be a number or None")
        if not 0 <= max_age_seconds <= sys.float_info.max:
            raise ValueError(
                f"max_age_seconds={max_age_seconds}: must be a number of seconds, not negative"
            )
