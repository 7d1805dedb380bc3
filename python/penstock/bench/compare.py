"""Whether one run is slower than another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from penstock.bench.results import ResultsError
from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from penstock.bench.results import Measurement, Results

MARGIN = 0.05
"""By how much slower is called slower: what machines differ by from hour to hour."""

CONFIDENCE = 0.95
"""For all cases together."""

ROUNDS_MIN = 3
_RESAMPLES = 9999

Verdict = Literal["slower", "faster", "same", "unclear", "missing"]


class Compared(NamedTuple):
    """One case in two runs.

    Attributes:
        case: Its label.
        before: Median of the first run, GB/s.
        after: Median of the second run, GB/s.
        ratio: Of the two medians.
        low: Lower end of the interval that the ratio is in.
        high: Upper end.
        verdict: ``"slower"`` if all of the interval is below 1 - margin, ``"faster"`` if it is
            above 1 + margin, ``"same"`` if it is between, ``"unclear"`` if it spans either, and
            ``"missing"`` where a run has too few measurements.
    """

    case: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: Verdict


def compare(
    before: Results, after: Results, *, margin: float = MARGIN, confidence: float = CONFIDENCE
) -> list[Compared]:
    """Compares the durable rates of all cases that both runs have.

    The interval of each ratio of medians is a bootstrap one (Efron 1979, percentiles), at a
    confidence that holds for all cases together (Bonferroni).

    Args:
        before: The run to hold the other against.
        after: The other.
        margin: What is too little to matter, as a part of the rate.
        confidence: That none of the intervals misses.

    Raises:
        ResultsError: The two have no case in common.
        MissingDependencyError: SciPy is not installed.
    """
    common = [case for case in before.cases if case in after.cases]
    if not common:
        raise ResultsError("the two runs have no case in common")
    each = 1 - (1 - confidence) / len(common)
    return [_one(case, _rates(before, case), _rates(after, case), margin, each) for case in common]


def _rates(results: Results, case: str) -> list[float]:
    def rate(one: Measurement) -> float:
        return one.durable_gb_per_second

    return [rate(one) for one in results.of(case, "penstock")]


def _one(
    case: str, before: Sequence[float], after: Sequence[float], margin: float, confidence: float
) -> Compared:
    if min(len(before), len(after)) < ROUNDS_MIN:
        nothing = float("nan")
        return Compared(case, nothing, nothing, nothing, nothing, nothing, "missing")
    medians = float(np.median(before)), float(np.median(after))
    low, high = _interval(np.array(before), np.array(after), confidence)
    verdict: Verdict = "unclear"
    if high < 1 - margin:
        verdict = "slower"
    elif low > 1 + margin:
        verdict = "faster"
    elif low >= 1 - margin and high <= 1 + margin:
        verdict = "same"
    return Compared(case, *medians, medians[1] / medians[0], low, high, verdict)


def _interval(
    before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], confidence: float
) -> tuple[float, float]:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingDependencyError(
            "comparing takes SciPy: pip install 'penstock[bench]'", name="scipy"
        ) from error

    def ratio(one: Any, other: Any, axis: int = -1) -> Any:
        return np.median(other, axis=axis) / np.median(one, axis=axis)

    found = stats.bootstrap(
        (before, after),
        ratio,
        n_resamples=_RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        # The same answer each time it is asked.
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
