"""The warning of a rank that waits for missing ranks."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from penstock.errors import PenstockWarning

if TYPE_CHECKING:
    from collections.abc import Sequence

_LISTED_MAX = 8


def remind(label: str, rank: int, missing: Sequence[int], timeout_seconds: float) -> None:
    """Warns that a rank waits for others, and how to save without them.

    Args:
        label: The subject of the round.
        rank: The waiting rank.
        missing: The missing ranks.
        timeout_seconds: The longest wait, in seconds.
    """
    listed = ", ".join(map(str, missing[:_LISTED_MAX])) + ", …" * (len(missing) > _LISTED_MAX)
    ranks = f"rank {listed}" if len(missing) == 1 else f"ranks {listed}"
    message = (
        f"{label}: rank {rank} waits for {ranks} to come to it, {timeout_seconds:g} s at most: "
        "every rank has to make this call, not only one (`if rank == 0:`); where one is meant to "
        "be alone, no_dist=True says so, to penstock.save and to CheckpointStore"
    )
    try:
        warnings.warn(message, PenstockWarning, stacklevel=_depth())
    except PenstockWarning:
        # Warnings are errors here, but no rank has failed yet, so the wait continues.
        sys.stderr.write(f"penstock: {message}\n")


def _depth() -> int:
    """Returns the stack level of the package's caller, as `warnings.warn` counts from `remind`."""
    depth = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("penstock."):
        frame = frame.f_back
        depth += 1
    return depth
