"""Simulated runs against formulas, and their accounts."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from penstock.planning import shares
from penstock.planning.simulation import Times, load, parse, presets, simulate, timeline

BASE = """
[cluster]
nodes = 100
failures_per_1000_node_days = 100

[job]
save_seconds = 60
detection_seconds = 30
start_seconds = 100
"""


def scenario(**changes):
    return parse(BASE, "test", "test").with_values(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stall_seconds": 5.0, "slowdown": 0.1},
        {"stall_seconds": 0, "interval_seconds": 300},
        {"interval_seconds": 2000, "detection_seconds": 900},
        {"failures_per_1000_node_days": 1500, "start_seconds": 200},
    ],
)
def test_runs_agree_with_the_exact_formula(changes):
    made = scenario(**changes)
    times = Times.of(made)
    results = simulate(made, days=60, runs=400, seed=1)
    exact = shares(
        times.period,
        times.cost,
        times.mtbf,
        restart_seconds=times.restart,
        down_seconds=made.job.detection_seconds,
        lag_seconds=times.save - times.stall,
    ).goodput
    error = results.goodput.std() / math.sqrt(400)
    # Work at the end has not been undone yet: up to a period in 60 days.
    assert abs(results.goodput.mean() - exact) < 4 * error + times.period / (60 * 86_400)


def test_time_is_conserved():
    for changes in ({}, {"spares": 2, "repair_seconds": 7200}, {"to": "local"}):
        results = simulate(scenario(**changes), days=20, runs=50, seed=3)
        parts = (results.goodput, results.saving, results.lost, results.down, results.restarting)
        assert np.allclose(sum(parts), 1, atol=1e-9)


def test_the_same_seed_gives_the_same_runs():
    first, second = (simulate(scenario(), runs=20, seed=7) for _ in range(2))
    assert (first.goodput == second.goodput).all()
    assert (simulate(scenario(), runs=20, seed=8).goodput != first.goodput).any()


def test_without_failures_only_saves_take_time():
    results = simulate(scenario(failures_per_1000_node_days=0, interval_seconds=600), runs=3)
    assert results.failures.max() == 0
    assert results.goodput == pytest.approx(0.9, abs=1e-3)


def test_local_checkpoints_are_lost_with_their_host():
    lost = simulate(scenario(to="local", host_loss_share=1.0), days=10, runs=50).goodput
    kept = simulate(scenario(to="local", host_loss_share=0.0), days=10, runs=50).goodput
    mirrored = simulate(
        scenario(to="local", host_loss_share=1.0, mirror=True, shared_write=1e12), days=10, runs=50
    ).goodput
    assert lost.mean() < 0.1 < mirrored.mean() <= kept.mean() + 0.01


def test_a_slow_mirror_loses_more():
    # 10 TB at 100 GB/s: a copy takes 100 s; at 1 GB/s, 10,000 s.
    settings = {"to": "local", "mirror": True, "checkpoint_bytes": 10e12, "interval_seconds": 600}
    quick = simulate(scenario(**settings, shared_write=1e11, shared_read=1e12), runs=50, days=20)
    slow = simulate(scenario(**settings, shared_write=1e9, shared_read=1e12), runs=50, days=20)
    assert slow.lost.mean() > 2 * quick.lost.mean()


def test_spares_are_waited_for():
    busy = simulate(scenario(spares=1, repair_seconds=86_400), days=20, runs=30)
    ready = simulate(scenario(spares=50, repair_seconds=86_400), days=20, runs=30)
    assert busy.down.mean() > 0.5 > 0.05 > ready.down.mean()
    none = simulate(scenario(spares=0, repair_seconds=3600), days=20, runs=30)
    assert none.down.mean() == pytest.approx(0.25, abs=0.1)


def test_weibull_failures_have_the_same_mean():
    for shape in (0.7, 1.5):
        results = simulate(
            scenario(weibull_shape=shape, start_seconds=0, detection_seconds=0), runs=300, days=60
        )
        expected = 60 * 100 * 100 / 1000
        assert results.failures.mean() == pytest.approx(expected, rel=0.03)


def test_replayed_failures():
    gaps = np.array([3600.0, 7200.0])
    results = simulate(
        scenario(start_seconds=0, detection_seconds=0, interval_seconds=600),
        days=30,
        runs=10,
        gaps=gaps,
    )
    assert (np.abs(results.failures - 30 * 86_400 / 5400) <= 2).all()


def test_a_restart_that_never_ends_is_refused():
    with pytest.raises(ValueError, match="no restart ever ends"):
        simulate(scenario(start_seconds=1000), gaps=np.array([500.0]), days=3000, runs=1)


def test_a_timeline_has_the_times_of_its_run():
    trace = timeline(scenario(stall_seconds=1), days=2, seed=5)
    json.dumps(trace, allow_nan=False)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {span["name"] for span in spans} == {"train", "stall", "write", "down", "restart"}
    main = sorted(
        (s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] in ("train", "down", "restart")
    )
    for (_, ends), (begins, _) in itertools.pairwise(main):
        assert begins == pytest.approx(ends, abs=1)
    assert main[-1][1] >= 2 * 86_400e6 * 0.999


@pytest.mark.parametrize("name", presets())
def test_presets_run(name):
    results = simulate(load(name), days=5, runs=10)
    assert 0 < results.goodput.mean() <= 1
    assert load(name).source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes", "test"),
        ("[cluster]\nnodes = 0", "nodes = 0"),
        ("[cluster]\nnodes = 1.5", "expected a number"),
        ("[cluster]\nnodes = true", "expected a number"),
        ("[cluster]\nnodes = inf", "expected a number"),
        ("[cluster]\nnode = 1", "unknown key 'node'"),
        ("[clusters]\nnodes = 1", "unknown key 'clusters'"),
        ("cluster = 3", "not a table"),
        ("[cluster]\nlink = '3h'", "but a time"),
        ("[cluster]\nlink = 0", "more than 0 bytes per second"),
        ("[job]\ninterval_seconds = '3GB'", "but a size"),
        ("[job]\nto = 'moon'", "expected 'local'"),
        ("[job]\nmirror = 1", "expected a bool"),
        ("[job]\nwriters = 2", "writers = 2"),
        ("[job]\nsave_seconds = 5\nstall_seconds = 6", "longer than a save"),
        ("[cluster]\nweibull_shape = 0.01", "weibull_shape"),
        ("[cluster]\nfailures_per_1000_node_days = nan", "nan"),
    ],
)
def test_wrong_scenarios_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text, "test", "test")


def test_an_interval_shorter_than_a_save_is_refused():
    with pytest.raises(ValueError, match="one is in flight at a time"):
        simulate(scenario(interval_seconds=30))
    with pytest.raises(ValueError, match="ten years"):
        simulate(scenario(), days=-1)


def test_waiting_at_the_end_is_cut(tmp_path):
    """A job of which each node waits ten days for its repair: up until its first failure."""
    results = simulate(
        scenario(repair_seconds=864_000, start_seconds=0, detection_seconds=0), days=1, runs=2000
    )
    rate = 100 * 100 / 1000  # Failures a day
    assert results.goodput.mean() == pytest.approx((1 - math.exp(-rate)) / rate, rel=0.2)
    assert results.goodput.mean() + results.saving.mean() + results.lost.mean() <= 1


def test_failures_in_a_restart_take_local_checkpoints_too():
    often = scenario(
        to="local", host_loss_share=0.5, failures_per_1000_node_days=2000, start_seconds=300
    )
    kept = scenario(to="shared", failures_per_1000_node_days=2000, start_seconds=300)
    assert (
        simulate(often, days=5, runs=50).goodput.mean()
        < simulate(kept, days=5, runs=50).goodput.mean()
    )
