"""Levels, copies on neighbours and drives."""

from __future__ import annotations

import itertools
import math

import pytest

from penstock.planning import (
    Level,
    copies_survive,
    drive_days,
    drive_writes_per_day,
    plan_levels,
)


@pytest.mark.parametrize(("hosts", "copies", "lost"), [(6, 2, 2), (6, 3, 4), (8, 2, 3), (4, 4, 4)])
def test_copies_survive_as_counted(hosts, copies, lost):
    groups = [set(range(first, first + copies)) for first in range(0, hosts, copies)]
    sets = [set(one) for one in itertools.combinations(range(hosts), lost)]
    good = sum(not any(group <= one for group in groups) for one in sets)
    assert copies_survive(hosts, copies, lost) == pytest.approx(good / len(sets))


def test_published_copies():
    """Gemini, SOSP'23: 16 hosts in pairs."""
    assert copies_survive(16, 2, 2) == pytest.approx(0.933, abs=5e-4)
    assert copies_survive(16, 2, 3) == pytest.approx(0.8, abs=5e-4)


def test_hosts_that_make_no_groups_are_refused():
    with pytest.raises(ValueError, match="whole groups"):
        copies_survive(7, 2, 1)


def test_one_level_is_young():
    plan = plan_levels([Level("disk", 60, 1e-4)])
    assert plan.periods_seconds[0] == pytest.approx(math.sqrt(2 * 60 / 1e-4))


def test_periods_are_multiples_and_a_useless_level_is_dropped():
    levels = [Level("memory", 1, 1e-4), Level("neighbour", 10, 2e-5), Level("bucket", 120, 1e-6)]
    plan = plan_levels(levels)
    assert [level.name for level in plan.levels] == ["memory", "neighbour", "bucket"]
    for below, above in itertools.pairwise(plan.periods_seconds):
        assert above / below == pytest.approx(round(above / below))
    # A level as dear as the next one is not worth its saves.
    levels[1] = Level("neighbour", 120, 2e-5)
    assert [level.name for level in plan_levels(levels).levels] == ["memory", "bucket"]


def test_no_other_choice_of_levels_wastes_less():
    levels = [Level("memory", 2, 3e-5), Level("neighbour", 9, 2e-5), Level("bucket", 60, 4e-6)]
    best = plan_levels(levels, down_seconds=30).waste
    for periods in itertools.product((100, 200, 400, 800, 1600), (1, 2, 3, 5, 8), (1, 2, 4, 8)):
        period, waste = 1.0, 0.0
        for level, factor in zip(levels, periods, strict=True):
            period *= factor
            waste += level.cost_seconds / period + level.rate_per_second * (period / 2 + 30)
        assert best <= waste * 1.01


def test_published_lives_of_drives():
    """1,636 GB each half hour on two drives of 61.44 TB and 65.2 PB, and of 7.68 TB and 14 PB."""
    a_day = 1636e9 * 48
    assert drive_days(a_day, 65.2e15) == pytest.approx(830, rel=0.01)
    assert drive_days(a_day, 14e15) == pytest.approx(178, rel=0.01)
    assert drive_writes_per_day(a_day, 61.44e12) == pytest.approx(1.28, rel=0.01)
    assert drive_days(0, 14e15) == math.inf
