"""How many times as fast: ratios of rates, with the intervals that they are in.

Both estimates are Hodges and Lehmann's (1963), of the logarithms of rates: like medians they do not
mind the few rounds that something else has disturbed, but they take a third fewer to be as sure.
The intervals are bootstrap ones (Efron 1979, percentiles). Such an interval is too narrow for few
values, as it never exceeds their range. A rank test, which needs no assumption and is exact where
values are few, decides whether a difference is chance.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_RESAMPLES = 9999
_PAIRS_MAX = 1 << 22
"""At a time: 32 MiB of them."""

_EXACT_ROUNDS_MAX = 50
_SIDES = ("less", "greater")


class Ratio(NamedTuple):
    """An estimate.

    It is that of the second to the first, with the ends of its interval, and with the chance
    that equal rates differ by as much in this direction.
    """

    ratio: float
    low: float
    high: float
    chance: float


def of_runs(before: Sequence[float], after: Sequence[float], confidence: float) -> Ratio:
    """The ratio of runs that have nothing to do with each other.

    The median of the ratios of every rate of the one to every rate of the other; the chance is that
    of Mann and Whitney (1947).
    """
    stats = _scipy()
    rates = np.log(np.array(after)), np.log(np.array(before))
    method = _method(max(len(before), len(after)))
    chance = min(
        stats.mannwhitneyu(*rates, alternative=side, method=method).pvalue for side in _SIDES
    )
    return _estimated(rates, _shift, len(before) * len(after), confidence, chance)


def of_rounds(before: Sequence[float], after: Sequence[float], confidence: float) -> Ratio:
    """The ratio of runs that were measured in turns: what a round has of its time, both have.

    The median of the means of every two ratios, each with itself as well; the chance is that of
    Wilcoxon (1945).
    """
    stats = _scipy()
    ratios = np.log(np.array(after) / np.array(before))
    unequal = ratios[ratios != 0]
    method = _method(len(unequal))
    chance = 1.0
    if len(unequal):
        chance = min(
            stats.wilcoxon(unequal, alternative=side, method=method).pvalue for side in _SIDES
        )
    return _estimated((ratios,), _centre, len(ratios) ** 2, confidence, chance)


def rounds_min(confidence: float, *, is_paired: bool) -> int:
    """How many rounds of each run it takes for a chance to be that small at all."""
    rounds = 2
    while 1 / (2**rounds if is_paired else math.comb(2 * rounds, rounds)) > 1 - confidence:
        rounds += 1
    return rounds


def _shift(after: Any, before: Any, axis: int = -1) -> Any:
    pairs = after[..., :, None] - before[..., None, :]
    return np.median(pairs.reshape(*pairs.shape[:-2], -1), axis=axis)


def _centre(ratios: Any, axis: int = -1) -> Any:
    first, second = np.triu_indices(ratios.shape[-1])
    return np.median((ratios[..., first] + ratios[..., second]) / 2, axis=axis)


def _estimated(
    samples: tuple[np.ndarray[Any, Any], ...],
    estimate: Callable[..., Any],
    pairs: int,
    confidence: float,
    chance: float,
) -> Ratio:
    found = (
        _scipy()
        .bootstrap(
            samples,
            estimate,
            n_resamples=_RESAMPLES,
            batch=max(1, _PAIRS_MAX // pairs),
            confidence_level=confidence,
            method="percentile",
            vectorized=True,
            # The same answer each time it is asked.
            rng=np.random.default_rng(0),
        )
        .confidence_interval
    )
    ratio, low, high = (float(np.exp(one)) for one in (estimate(*samples), found.low, found.high))
    return Ratio(ratio, low, high, float(chance))


def _method(rounds: int) -> str:
    """Exact where that takes no time; there are no ties among rates to speak of."""
    return "exact" if rounds <= _EXACT_ROUNDS_MAX else "asymptotic"


def _scipy() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingDependencyError(
            "comparing takes SciPy: pip install 'penstock[bench]'", name="scipy"
        ) from error
    return stats
