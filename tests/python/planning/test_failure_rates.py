"""Failure rates from nodes and from counts."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.planning import Quantity, given, mtbf, mtbf_counted
from penstock.planning.models.failures import NODE_RATE


def test_published_rates():
    """arXiv 2410.21680: 6.50 failures per 1,000 node-days; 16,384 and 131,072 GPUs."""
    rate = given(6.50, NODE_RATE.unit, "RSC-1")
    assert mtbf(2048, rate).value / 3600 == pytest.approx(1.8, rel=0.01)
    assert mtbf(16_384, rate).value / 3600 == pytest.approx(0.23, rel=0.03)


def test_the_spread_of_a_rate_is_turned_around():
    low, high = mtbf(64, NODE_RATE).bounds
    assert low < mtbf(64, NODE_RATE).value < high
    assert mtbf(64, NODE_RATE).is_guess


def test_counts_cover_the_rate_that_made_them():
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        truth = 10 ** generator.uniform(3, 6)
        exposure = truth * generator.uniform(1, 30)
        failures = int(generator.poisson(exposure / truth))
        low, high = mtbf_counted(failures, exposure, "counted").bounds
        covered += low <= truth <= high
    assert covered >= 165  # 90 % of 200 are 180, and 165 is below the 0.1 % quantile.


def test_time_without_a_failure_is_evidence():
    prior = mtbf(16, NODE_RATE)
    quiet = mtbf_counted(0, 100 * prior.value, "history", prior)
    assert quiet.value > 5 * prior.value
    assert quiet.is_guess, "nothing was counted"
    assert not mtbf_counted(3, prior.value, "history", prior).is_guess


@pytest.mark.parametrize(("failures", "exposure"), [(-1, 5.0), (0, -5.0), (0, 0.0)])
def test_senseless_counts_are_refused(failures, exposure):
    with pytest.raises(ValueError, match="history"):
        mtbf_counted(failures, exposure, "history")


def test_no_rate_is_zero():
    with pytest.raises(ValueError, match="nothing ever fails"):
        mtbf(4, given(0.0, NODE_RATE.unit, "--node-rate"))
    with pytest.raises(ValueError, match="one to a billion"):
        mtbf(0, NODE_RATE)


@pytest.mark.parametrize(
    "numbers", [(-1.0, None, None), (float("nan"), None, None), (5.0, 6.0, 7.0)]
)
def test_a_quantity_lies_in_its_spread(numbers):
    value, low, high = numbers
    with pytest.raises(ValueError, match=r"expected|outside"):
        Quantity(value, "s", "given", "x", low, high)
