"""Failure rates: from nodes and a rate of a node, from a history, or both.

A rate of a node is in failures per 1,000 node-days, as Meta and others publish it; a node has eight
GPUs there. Counts of few failures say little: their spread is that of the gamma distribution.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from penstock.planning.models.quantity import Quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.planning.models.quantity import Origin

SECONDS_PER_DAY = 86_400

RANKS_PER_NODE = 8
"""Ranks of a node where nothing else is known."""

NODE_RATE = Quantity(
    4.0,
    "failures per 1,000 node-days",
    "assumed",
    "Meta's two research clusters, 2.34 and 6.50 (arXiv 2410.21680)",
    2.34,
    6.50,
)
"""The rate of a node where nothing else is known."""

_PRIOR_FAILURES = 8.0
"""Weight of `NODE_RATE` against counted failures: a gamma distribution of this shape has 90 % of
its mass between 2.0 and 6.6 around 4, about the two published rates.
"""

_OTHER_SHARE = 0.05
"""Probability that a job fails at a rate that has nothing to do with the published ones."""

_OTHER_FACTOR = 1e4
"""Such a rate is higher by up to this factor, each order of magnitude as likely, or lower."""

_GRID = 400
"""Rates at which a distribution is computed: its quantiles are exact to 1 %."""


def mtbf(nodes: float, node_rate: Quantity) -> Quantity:
    """Mean time between failures of a job, from its nodes and the rate of one.

    M = 86400 · 1000 / (nodes · rate) seconds.

    Raises:
        ValueError: There are no nodes, or the rate is zero.
    """
    if not 0 < nodes <= 1e9:
        raise ValueError(f"{nodes!r} nodes: expected one to a billion")
    low, high = node_rate.bounds
    if not low > 0:
        raise ValueError(
            f"{node_rate.source}: a failure rate of {low:g} means that nothing ever fails; leave "
            "it out to assume a published rate"
        )
    scale = 1000 * SECONDS_PER_DAY / nodes
    named = "1 node" if nodes == 1 else f"{nodes:g} nodes"
    return Quantity(
        scale / node_rate.value,
        "s",
        node_rate.origin,
        f"{named}, {node_rate.value:.3g} failures per 1,000 node-days: {node_rate.source}",
        scale / high,
        scale / low,
    )


def rate_quantiles(
    failures: float,
    exposure_seconds: float,
    shares: Sequence[float],
    prior_mtbf: Quantity | None = None,
) -> list[float]:
    """Quantiles of the failure rate, per second, after some failures in a time of running.

    The prior is mostly a gamma distribution around the rate of `prior_mtbf`, with the weight of
    `NODE_RATE`. A small part of it allows any other rate, so that a few failures of a job that
    fails far more often outweigh what others published. Without `prior_mtbf`, it is Jeffreys': half
    a failure in no time.

    The median is the number to plan with: a period that is too long by some factor costs as much as
    one that is too short by it, and the mean would be that of the largest rates.

    Args:
        failures: Failures that were counted.
        exposure_seconds: Running time in which they came; more than 0, or there is a prior.
        shares: Shares of the distribution below the quantiles, ascending.
        prior_mtbf: Mean time between failures by published rates.
    """
    centres = [(failures + 0.5) / exposure_seconds] if exposure_seconds > 0 else []
    highest = 0.0
    if prior_mtbf is not None:
        centres.append(1 / prior_mtbf.value)
        highest = _OTHER_FACTOR / prior_mtbf.value
    low, high = math.log(min(centres) * 1e-4), math.log(max(max(centres) * 30, highest))
    logs = [low + (high - low) * index / (_GRID - 1) for index in range(_GRID)]
    weights = [
        failures * log - math.exp(log) * exposure_seconds + _log_prior(log, prior_mtbf)
        for log in logs
    ]
    top = max(weights)
    masses = list(accumulate(math.exp(weight - top) for weight in weights))
    found = []
    for share in shares:
        target = share * masses[-1]
        index = min(max(1, bisect_left(masses, target)), _GRID - 1)
        part = (target - masses[index - 1]) / (masses[index] - masses[index - 1])
        step = logs[index] - logs[index - 1]
        # A mass stands for the range around its point.
        found.append(math.exp(logs[index] + (part - 0.5) * step))
    return found


def _log_prior(log_rate: float, prior_mtbf: Quantity | None) -> float:
    """Logarithm of the prior's density over logarithms of rates."""
    if prior_mtbf is None:
        return 0.5 * log_rate
    expected = _PRIOR_FAILURES * prior_mtbf.value * math.exp(log_rate)
    published = math.exp(
        _PRIOR_FAILURES * math.log(expected) - expected - math.lgamma(_PRIOR_FAILURES)
    )
    # Jeffreys' prior below the published rate: without a failure, rates near 0 do not win.
    other = min(1.0, math.exp(log_rate / 2) * math.sqrt(prior_mtbf.value))
    other /= 2 + math.log(_OTHER_FACTOR)
    return math.log((1 - _OTHER_SHARE) * published + _OTHER_SHARE * other)


def mtbf_counted(
    failures: int, exposure_seconds: float, source: str, prior_mtbf: Quantity | None = None
) -> Quantity:
    """Mean time between failures after `failures` in `exposure_seconds` of running.

    The value and the spread, which has 90 % of the mass, are those of `rate_quantiles`. Running
    time without a failure counts: it is evidence of a lower rate.

    Raises:
        ValueError: A count or a time is negative, or nothing ran and no prior is given.
    """
    if failures < 0 or not exposure_seconds >= 0:
        raise ValueError(f"{source}: {failures} failures in {exposure_seconds:g} s")
    if exposure_seconds <= 0 and prior_mtbf is None:
        raise ValueError(f"{source}: nothing ran, so nothing is known of failures")
    low, rate, high = rate_quantiles(failures, exposure_seconds, (0.05, 0.5, 0.95), prior_mtbf)
    origin: Origin = (
        "measured" if failures else ("assumed" if prior_mtbf is None else prior_mtbf.origin)
    )
    return Quantity(1 / rate, "s", origin, source, 1 / high, 1 / low)
