"""Ours beside another one: how many times as fast, and whether that is more than noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from penstock.errors import MissingDependencyError
from penstock_bench.results import ratios
from penstock_bench.results.compare import CONFIDENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

Verdict = Literal["told", "noise", "few", "untested"]

WHY = {
    "noise": "which may be noise",
    "few": "too few rounds to tell from noise",
    "untested": "whether that is noise takes SciPy: pip install 'penstock[bench]'",
}
"""Of verdicts that give no ratio."""


class Beside(NamedTuple):
    """Ours by another one.

    Attributes:
        ratio: How many times as fast, or as long.
        low: What that is at least.
        high: What it is at most.
        verdict: ``"told"``, ``"noise"`` (it may as well be 1), ``"few"`` (rounds) or
            ``"untested"`` (SciPy is not installed).
    """

    ratio: float
    low: float
    high: float
    verdict: Verdict

    @property
    def interval(self) -> str:
        """What the ratio lies between."""
        return f"[{times(self.low)}, {times(self.high)}]"


def beside(ours: Sequence[float], theirs: Sequence[float], comparisons: int) -> Beside:
    """All rounds of ours by all rounds of another one.

    Args:
        ours: What each round of ours has: a rate, or the inverse of a time.
        theirs: And of the other one.
        comparisons: How many such are made of one run: what is said of all of them holds together.
    """
    confidence = 1 - (1 - CONFIDENCE) / comparisons
    ratio = float(np.median(ours) / np.median(theirs))
    if min(len(ours), len(theirs)) < ratios.rounds_min(confidence, is_paired=False):
        return Beside(ratio, ratio, ratio, "few")
    try:
        found = ratios.of_runs(theirs, ours, confidence)
    except MissingDependencyError:
        return Beside(ratio, ratio, ratio, "untested")
    is_told = found.chance <= 1 - confidence and not found.low <= 1 <= found.high
    return Beside(found.ratio, found.low, found.high, "told" if is_told else "noise")


def times(ratio: float) -> str:
    """A ratio with the digits that count."""
    return f"{ratio:,.0f}" if ratio >= 20 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"
