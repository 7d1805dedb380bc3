"""Jobs that share a cluster."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.planning.simulation import jobs, parse, simulate, simulate_jobs

BASE = """
[cluster]
nodes = 32
failures_per_1000_node_days = 100
shared_write = "10GB/s"
shared_read = "10GB/s"

[job]
checkpoint_bytes = "600GB"
detection_seconds = 30
start_seconds = 100
"""

TWO = """
[[jobs]]
name = "a"
nodes = 16
[[jobs]]
name = "b"
nodes = 16
"""


def scenario(text=BASE, **changes):
    return parse(text, "test", "test").with_values(**changes)


def only(results):
    (found,) = results.values()
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"stall_seconds": 5, "slowdown": 0.1}, {"spares": 2, "repair_seconds": 20_000}],
)
def test_one_job_agrees_with_the_runs_without_events(changes):
    made = scenario(**changes)
    plain = simulate(made, days=30, runs=200).goodput
    found = only(simulate_jobs(made, days=30, runs=12)).goodput
    error = math.sqrt(plain.var() / 200 + found.var() / 12)
    assert abs(plain.mean() - found.mean()) < 4 * error + 1e-3


def test_time_is_conserved():
    made = scenario(BASE + TWO, spares=1, repair_seconds="8h", repair_crews=1, nodes_min=12,
                    stall_seconds=3, slowdown=0.2)  # fmt: skip
    for found in simulate_jobs(made, days=20, runs=4).values():
        parts = (found.saving, found.lost, found.down, found.restarting, found.missing)
        assert np.allclose(found.goodput + sum(parts), 1, atol=1e-9)


def test_the_same_seed_gives_the_same_runs():
    made = scenario(BASE + TWO)
    first, second = (simulate_jobs(made, days=5, runs=2, seed=3)["a"] for _ in range(2))
    assert (first.goodput == second.goodput).all()


def test_saves_of_two_jobs_share_the_file_system():
    """Without failures, both save at the same time, and each takes twice as long."""
    settings = {"failures_per_1000_node_days": 0, "interval_seconds": 600}
    alone = parse(BASE + TWO.partition('[[jobs]]\nname = "b"')[0], "test", "test")
    (one,) = simulate_jobs(alone.with_values(**settings), days=2, runs=1).values()
    both = simulate_jobs(scenario(BASE + TWO, **settings), days=2, runs=1)
    saves = 2 * 86_400 / 600
    assert one.saving[0] * 2 * 86_400 == pytest.approx(60 * saves, rel=0.02)
    cycle = 540 + 120
    assert both["a"].saving[0] == pytest.approx(120 / cycle, rel=0.02)


def test_a_short_transfer_ends_late_in_a_run(monkeypatch):
    """Its last bytes take less time than the clock of a long run can show."""
    monkeypatch.setattr(jobs, "EVENTS_MAX", 100_000)
    made = scenario(nodes=64, failures_per_1000_node_days=4, shared_write="100GB/s",
                    shared_read="100GB/s", checkpoint_bytes="7GB", stall_seconds=0.01,
                    interval_seconds=3600)  # fmt: skip
    assert only(simulate_jobs(made, days=30, runs=1)).goodput[0] > 0.9


def test_jobs_wait_for_one_pool_of_spares():
    few = scenario(BASE + TWO, spares=1, repair_seconds="12h")
    many = scenario(BASE + TWO, spares=20, repair_seconds="12h")
    waits = [simulate_jobs(one, days=20, runs=4)["a"].down.mean() for one in (few, many)]
    assert waits[0] > 0.2 > 0.02 > waits[1]


def test_repairs_queue_for_a_crew():
    settings = {"spares": 3, "repair_seconds": "10h"}
    one = scenario(BASE, repair_crews=1, **settings)
    many = scenario(BASE, repair_crews=10, **settings)
    waits = [only(simulate_jobs(each, days=30, runs=6)).down.mean() for each in (one, many)]
    assert waits[0] > 1.5 * waits[1]


def test_a_job_goes_on_with_fewer_nodes():
    """It trains more slowly instead of waiting for a repair of a day."""
    settings = {"spares": 1, "repair_seconds": "1d", "failures_per_1000_node_days": 30}
    waits = only(simulate_jobs(scenario(**settings), days=30, runs=6))
    goes_on = only(
        simulate_jobs(scenario(nodes_min=24, reshard_seconds=60, **settings), days=30, runs=6)
    )
    assert goes_on.goodput.mean() > waits.goodput.mean() + 0.1
    assert goes_on.missing.mean() > 0 == waits.missing.mean()
    assert goes_on.down.mean() < waits.down.mean()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[jobs]]\nnodes = 20\n[[jobs]]\nnodes = 20", "run on 40 nodes"),
        ("[[jobs]]\nnodes = 50", "nodes = 50"),
        ("[[jobs]]\nnodes = 4\nnodes_min = 5", "nodes_min = 5"),
        ("[[jobs]]\nnode = 4", "unknown key 'node'"),
        (
            '[[jobs]]\nname = "a"\nnodes = 4\n[[jobs]]\nname = "a"\nnodes = 4',
            "2 jobs have the name",
        ),
        ('[policies.fast]\nname = "x"', "name: neither a cluster nor a job"),
        ("[policies]\nfast = 3", "policies is no table of tables"),
        ("[policies.fast]\ninterval = 3", "neither a cluster nor a job"),
        ("[policies.fast]\nslowdown = 3", "slowdown = 3"),
    ],
)
def test_wrong_jobs_and_policies_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse(BASE + text, "test", "test")


def test_jobs_have_names_of_their_own():
    made = parse(BASE + 'name = "train"\n[[jobs]]\nnodes = 4\n[[jobs]]\nnodes = 8', "test", "test")
    assert list(simulate_jobs(made, days=1, runs=1)) == ["job 1", "job 2"]


def test_a_list_of_jobs_is_a_list():
    with pytest.raises(ValueError, match="before each"):
        parse("jobs = 3\n" + BASE, "test", "test")
    with pytest.raises(ValueError, match="mirror and save_seconds"):
        simulate_jobs(scenario(BASE + TWO, mirror=True), runs=1)
