"""Which percentiles of latency a measurement has enough requests for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from penstock_bench.results.results import Measurement, Results

BEYOND_MIN = 10
"""Requests that have to lie beyond a percentile: of fewer the next round has another one."""

_ALWAYS = ("mean", "p50", "max")
"""What any number of requests has."""


def percent(name: str) -> float:
    """The number of a percentile by its name; ``"max"`` is 100."""
    try:
        return float(name.removeprefix("p"))
    except ValueError:
        return 100.0


def supported(one: Measurement) -> dict[str, float]:
    """Microseconds of a request, by those percentiles that the number of requests supports."""
    return {
        name: value
        for name, value in one.latency_us.items()
        if name in _ALWAYS or round(one.requests * (100 - percent(name)), 6) >= 100 * BEYOND_MIN
    }


def latencies(results: Results, case: str, by: str) -> dict[str, float]:
    """The median of each percentile over the rounds; those that all rounds have and support."""
    measured = [supported(one) for one in results.of(case, by)]
    names = [name for name in (measured[0] if measured else {}) if all(name in m for m in measured)]
    return {name: float(np.median([one[name] for one in measured])) for name in names}
