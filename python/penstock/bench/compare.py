"""Whether one run is slower than another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from penstock.bench.results import ResultsError
from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from penstock.bench.results import Results

MARGIN = 0.05
"""By how much slower is called slower: what machines differ by from hour to hour."""

CONFIDENCE = 0.99
"""For all cases together."""

ROUNDS_MIN = 3
_RESAMPLES = 9999
_PAIRS_MAX = 1 << 22
"""At a time: 32 MiB of them."""

Verdict = Literal["slower", "faster", "same", "unclear", "missing"]


class Compared(NamedTuple):
    """One case in two runs.

    Attributes:
        case: Its label.
        before: Median of the first run, GB/s.
        after: Median of the second run, GB/s.
        ratio: Of the second run to the first.
        low: Lower end of the interval that the ratio is in.
        high: Upper end.
        verdict: ``"slower"`` if the ratio is below 1 - margin and all of the interval below 1,
            ``"faster"`` if they are above 1 + margin and 1, ``"same"`` if all of the interval is
            within the margin, ``"unclear"`` if none of these, and ``"missing"`` where a run has too
            few measurements.
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

    A ratio is the median of those of every measurement of the one run to every one of the other
    (Hodges and Lehmann 1963): like a median it does not mind the few rounds that something else
    has disturbed, but it takes a third fewer to be as sure. Its interval is a bootstrap one (Efron
    1979, percentiles), at a confidence that holds for all cases together (Bonferroni).

    To ask that all of the interval is beyond the margin would take four times the rounds to notice
    what is twice the margin; that it excludes 1 is what keeps noise from being an alarm.

    Args:
        before: The run to hold the other against.
        after: The other.
        margin: What is too little to matter, as a part of the rate.
        confidence: That none of the intervals misses.

    Raises:
        ResultsError: The two have no case in common.
        MissingDependencyError: SciPy is not installed.
    """
    common = [pair for pair in _ours(before) if pair in _ours(after)]
    if not common:
        raise ResultsError("the two runs have no case in common")
    each = 1 - (1 - confidence) / len(common)
    return [
        _one(
            case if by == "penstock" else f"{case}, {by}",
            _rates(before, case, by),
            _rates(after, case, by),
            margin,
            each,
        )
        for case, by in common
    ]


def _ours(results: Results) -> list[tuple[str, str]]:
    """The cases with the ways that Penstock was measured in: others are what it is held against."""
    names = dict.fromkeys(one.by for one in results.measurements if one.by.startswith("penstock"))
    return [(case, by) for case in results.cases for by in names]


def _rates(results: Results, case: str, by: str) -> list[float]:
    return [one.durable_gb_per_second for one in results.of(case, by)]


def _one(
    case: str, before: Sequence[float], after: Sequence[float], margin: float, confidence: float
) -> Compared:
    if min(len(before), len(after)) < ROUNDS_MIN:
        nothing = float("nan")
        return Compared(case, nothing, nothing, nothing, nothing, nothing, "missing")
    medians = float(np.median(before)), float(np.median(after))
    rates = np.array(before), np.array(after)
    ratio = float(_ratio(*rates))
    low, high = _interval(*rates, confidence)
    verdict: Verdict = "unclear"
    if ratio < 1 - margin and high < 1:
        verdict = "slower"
    elif ratio > 1 + margin and low > 1:
        verdict = "faster"
    elif low >= 1 - margin and high <= 1 + margin:
        verdict = "same"
    return Compared(case, *medians, ratio, low, high, verdict)


def _ratio(before: Any, after: Any, axis: int = -1) -> Any:
    pairs = after[..., :, None] / before[..., None, :]
    return np.median(pairs.reshape(*pairs.shape[:-2], -1), axis=axis)


def _interval(
    before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], confidence: float
) -> tuple[float, float]:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingDependencyError(
            "comparing takes SciPy: pip install 'penstock[bench]'", name="scipy"
        ) from error

    found = stats.bootstrap(
        (before, after),
        _ratio,
        n_resamples=_RESAMPLES,
        batch=max(1, _PAIRS_MAX // (len(before) * len(after))),
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        # The same answer each time it is asked.
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
