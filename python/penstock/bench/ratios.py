"""How many times as fast: ratios of rates, with the intervals that they are in.

Both estimates are Hodges and Lehmann's (1963), of the logarithms of rates: like medians they do not
mind the few rounds that something else has disturbed, but they take a third fewer to be as sure.
The intervals are bootstrap ones (Efron 1979, percentiles).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_RESAMPLES = 9999
_PAIRS_MAX = 1 << 22
"""At a time: 32 MiB of them."""


class Ratio(NamedTuple):
    """An estimate.

    Attributes:
        ratio: Of the second to the first.
        low: Lower end of the interval that it is in.
        high: Upper end.
    """

    ratio: float
    low: float
    high: float


def of_runs(before: Sequence[float], after: Sequence[float], confidence: float) -> Ratio:
    """The ratio of runs that have nothing to do with each other.

    The median of the ratios of every rate of the one to every rate of the other.

    Raises:
        MissingDependencyError: SciPy is not installed.
    """
    rates = np.log(np.array(after)), np.log(np.array(before))
    return _estimated(rates, _shift, len(before) * len(after), confidence)


def of_rounds(before: Sequence[float], after: Sequence[float], confidence: float) -> Ratio:
    """The ratio of runs that were measured in turns: what a round has of its time, both have.

    The median of the means of every two ratios, each with itself as well.

    Args:
        before: The rate of each round.
        after: That of the same round of the other.
        confidence: Of the interval.

    Raises:
        MissingDependencyError: SciPy is not installed.
    """
    ratios = np.log(np.array(after) / np.array(before))
    return _estimated((ratios,), _centre, len(ratios) ** 2, confidence)


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
) -> Ratio:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingDependencyError(
            "comparing takes SciPy: pip install 'penstock[bench]'", name="scipy"
        ) from error

    found = stats.bootstrap(
        samples,
        estimate,
        n_resamples=_RESAMPLES,
        batch=max(1, _PAIRS_MAX // pairs),
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        # The same answer each time it is asked.
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Ratio(*(float(np.exp(one)) for one in (estimate(*samples), found.low, found.high)))
