"""Formulas of one level against published tables and against brute-force simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.planning import (
    best_period,
    daly,
    ettr,
    goodput_first_order,
    rfo,
    save_cost,
    shares,
    shares_weibull,
    young,
)

# arXiv 1302.3752: M = 125 years / N for N = 2^10 .. 2^19, C = R = 600 s, D = 60 s.
MTBF = (3849609, 1924805, 962402, 481201, 240601, 120300, 60150, 30075, 15038, 7519)
YOUNG = (68567, 48660, 34584, 24630, 17592, 12615, 9096, 6608, 4848, 3604)
DALY = (68573, 48668, 34595, 24646, 17615, 12648, 9142, 6673, 4940, 3733)
RFO = (67961, 48052, 33972, 24014, 16968, 11982, 8449, 5941, 4154, 2869)
OPTIMUM = (68240, 48320, 34189, 24231, 17194, 12218, 8701, 6214, 4458, 3218)


@pytest.mark.parametrize("row", range(len(MTBF)))
def test_published_periods(row):
    mtbf = 125 * 365 * 86_400 / 2 ** (10 + row)
    assert mtbf == pytest.approx(MTBF[row], rel=1e-3)
    mtbf = MTBF[row]
    assert young(600, mtbf) == pytest.approx(YOUNG[row], abs=1)
    assert daly(600, mtbf, 600, 60) == pytest.approx(DALY[row], abs=1)
    assert rfo(600, mtbf, 600, 60) == pytest.approx(RFO[row], abs=1)
    # Published optima are the minima of a numeric search.
    assert best_period(600, mtbf) == pytest.approx(OPTIMUM[row], rel=1.5e-3)


def test_published_effective_time():
    """Meta's research clusters, arXiv 2410.21680."""
    assert ettr(6.5e-3, 2000, period_seconds=300, restart_seconds=300) == pytest.approx(
        0.93, abs=0.01
    )
    goodput = ettr(2.34e-3, 12_500, period_seconds=120, restart_seconds=120, save_seconds=5)
    assert goodput == pytest.approx(0.9, abs=0.01)


def test_the_best_period_is_best():
    for cost, mtbf in ((1, 1e4), (60, 3600), (600, 7519), (0.001, 1e8), (500, 600)):
        best = best_period(cost, mtbf)
        goodput = shares(best, cost, mtbf).goodput
        for factor in (0.8, 0.99, 1.01, 1.25):
            if best * factor > cost:
                assert shares(best * factor, cost, mtbf).goodput < goodput + 1e-12


def test_shares_add_up_to_one():
    generator = np.random.default_rng(3)
    for _ in range(500):
        mtbf, cost = 10 ** generator.uniform(2, 6), 10 ** generator.uniform(-1, 3)
        result = shares(
            cost + 10 ** generator.uniform(-1, 6),
            cost,
            mtbf,
            restart_seconds=10 ** generator.uniform(-1, 4),
            down_seconds=10 ** generator.uniform(-1, 3),
            lag_seconds=10 ** generator.uniform(-1, 4),
        )
        parts = (result.goodput, result.saving, result.lost, result.down, result.restarting)
        assert sum(parts) == pytest.approx(1, abs=1e-9)
        assert min(parts) >= -1e-9


def test_a_synchronous_save_costs_its_whole_time():
    assert save_cost(60, 60, 0.1) == 60
    assert save_cost(5, 65, 0.1) == pytest.approx(11)
    assert save_cost(60, 60, 0.9) == save_cost(60, 60, 0.0)


def test_rare_failures_agree_with_the_first_order():
    for period in (100.0, 1000.0):
        costs = {"restart_seconds": 50.0, "down_seconds": 20.0, "lag_seconds": 30.0}
        exact = shares(period, 5, 1e6, **costs).goodput
        assert exact == pytest.approx(goodput_first_order(period, 5, 1e6, **costs), abs=1e-5)


def test_weibull_of_shape_one_is_exponential():
    assert shares_weibull(500, 20, 5000, 1.0, lag_seconds=100).goodput == pytest.approx(
        shares(500, 20, 5000, lag_seconds=100).goodput, rel=1e-9
    )


def exponential(mtbf):
    return lambda generator, count: generator.exponential(mtbf, count)


def weibull(scale, shape):
    return lambda generator, count: scale * generator.weibull(shape, count)


def cycles(generator, count, period, cost, draw, restart, down, lag):
    """Simulates cycles from one failure to the next, event by event.

    Returns:
        Training seconds that count and seconds in all, of each cycle.
    """
    spent = np.zeros(count)
    is_down = np.ones(count, bool)
    left = np.zeros(count)
    while is_down.any():  # A restart that fails begins anew.
        spent[is_down] += down
        left[is_down] = draw(generator, int(is_down.sum()))
        failed = is_down & (left < restart)
        spent[failed] += left[failed]
        is_down = failed
    spent += restart
    left -= restart
    kept, snapshots = np.zeros(count), np.zeros(count)
    runs = np.ones(count, bool)
    while runs.any():
        # The snapshot taken at the end of the last period is durable `lag` later, if nothing fails.
        is_durable = runs & (snapshots > 0) & (left >= lag)
        kept[is_durable] = snapshots[is_durable] * (period - cost)
        ends = runs & (left < period)
        spent[ends] += left[ends]
        runs &= ~ends
        spent[runs] += period
        left[runs] -= period
        snapshots[runs] += 1
    return kept, spent


def outside(kept, spent, goodput):
    """Whether a formula lies outside of the 99 % interval of a ratio of means."""
    ratio = kept.mean() / spent.mean()
    error = (kept - ratio * spent).std() / spent.mean() / math.sqrt(len(kept))
    return abs(ratio - goodput) > 2.576 * error + 1e-12


def test_exponential_failures_are_those_of_a_simulation():
    generator = np.random.default_rng(20261127)
    missed = 0
    for _ in range(200):
        mtbf = 10 ** generator.uniform(2.5, 5.5)
        period = mtbf / 10 ** generator.uniform(0, 1.5)
        cost, lag = period * generator.uniform(0.001, 0.5), period * generator.uniform(0, 1)
        restart, down = mtbf * generator.uniform(0, 0.5), mtbf * generator.uniform(0, 0.3)
        kept, spent = cycles(generator, 4000, period, cost, exponential(mtbf), restart, down, lag)
        costs = {"restart_seconds": restart, "down_seconds": down, "lag_seconds": lag}
        missed += outside(kept, spent, shares(period, cost, mtbf, **costs).goodput)
    # One in a hundred lies outside by chance: seven of 200 have a probability of 0.5 %.
    assert missed < 7


def test_weibull_failures_are_those_of_a_simulation():
    generator = np.random.default_rng(5)
    missed = 0
    for _ in range(60):
        mtbf, shape = 10 ** generator.uniform(3, 5), generator.uniform(0.6, 2)
        scale = mtbf / math.gamma(1 + 1 / shape)
        period = mtbf / 10 ** generator.uniform(0, 1.3)
        cost, lag = period * generator.uniform(0.001, 0.5), period * generator.uniform(0, 1)
        down = mtbf * generator.uniform(0, 0.3)
        kept, spent = cycles(generator, 4000, period, cost, weibull(scale, shape), 0, down, lag)
        result = shares_weibull(period, cost, mtbf, shape, down_seconds=down, lag_seconds=lag)
        missed += outside(kept, spent, result.goodput)
    assert missed < 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10.0, 20.0, 100.0), "leaves no time to train"),
        ((10.0, 1.0, 0.0), "expected more than 0"),
        ((10.0, 1.0, math.nan), "expected more than 0"),
        ((10.0, -1.0, 100.0), "not negative"),
    ],
)
def test_times_that_no_job_has_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        shares(*arguments)


def test_a_recovery_longer_than_the_time_between_failures_has_no_first_order():
    with pytest.raises(ValueError, match="rarer failures"):
        rfo(60, 600, 500, 200)


def test_absurd_rates_give_no_overflow():
    assert shares(1e9, 1, 1).goodput == 0
    assert shares(1e9, 1, 1, restart_seconds=1e9).goodput == 0
    assert best_period(0, 100) == 0
