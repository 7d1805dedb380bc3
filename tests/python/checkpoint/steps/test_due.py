"""`CheckpointStore.due`: when to save, the same on all ranks."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

import penstock
from pacing import BEGAN, Auto, Fixed, Job, Phase, best_steps
from penstock.checkpoint.ranks import round as ranks_round
from penstock.checkpoint.ranks.mailbox import Mailbox
from penstock.checkpoint.steps import pace as module
from penstock.checkpoint.steps.pace import FIRST_STEPS, Pace
from penstock.errors import RankError
from penstock.planning import best_period


class Clock:
    """A clock of one rank, which runs at its own speed."""

    def __init__(self, monkeypatch=None):
        self.now = random.random() * 1000
        if monkeypatch is not None:
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


def auto(tmp_path, **settings):
    settings = {"failures_per_hour": 10.0, "seconds_max": 3600.0, **settings}
    return Pace("auto", root=str(tmp_path), **settings)


def run(pace, clock, steps, *, step_seconds, stall, durable=None, began=0):
    """Runs steps of a training that saves whenever it is due; returns the steps of its saves."""
    saved = []
    for step in range(began + 1, began + steps + 1):
        clock.now += step_seconds
        if pace.due(step, is_saving=False):
            pace.entered(None)
            clock.now += stall
            pace.saved(stall, durable or stall)
            saved.append(step)
    return saved


def test_a_number_of_steps(tmp_path):
    store = penstock.CheckpointStore(tmp_path, save_every=10)
    due = [step for step in range(1, 41) if store.due(step) and store.save(step, {"w": 1})]
    assert due == [10, 20, 30, 40]


def test_steps_count_from_the_step_that_was_resumed(tmp_path):
    store = penstock.CheckpointStore(tmp_path, save_every=10)
    training = penstock.Training(losses=[])
    store.save(7, training)
    other = penstock.CheckpointStore(tmp_path, save_every=10)
    assert other.resume(penstock.Training(losses=[])) == 7
    assert [step for step in range(8, 30) if other.due(step)] == [17, 27]


def test_a_store_without_a_rule_says_so(tmp_path):
    with pytest.raises(ValueError, match="save_every is None"):
        penstock.CheckpointStore(tmp_path).due(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_every": 0}, "save_every=0"),
        ({"save_every": "often"}, "'often'"),
        ({"save_every": True}, "save_every=True"),
        ({"save_every": "auto", "failures_per_hour": 0}, "failures_per_hour=0"),
        ({"save_every": "auto", "failures_per_hour": float("nan")}, "failures_per_hour"),
        ({"save_every": "auto", "save_seconds_max": 0}, "save_seconds_max"),
    ],
)
def test_senseless_rules_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        penstock.CheckpointStore(tmp_path, **settings)


def test_the_interval_is_the_best_one(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    pace = auto(tmp_path)
    saved = run(pace, clock, 3000, step_seconds=1.0, stall=5.0)
    assert saved[:2] == [FIRST_STEPS, 2 * FIRST_STEPS]
    best = best_period(5.0, 360.0) - 5.0
    gaps = np.diff(saved[2:])
    assert (np.abs(gaps - best) <= 1).all()


def test_it_adapts_to_the_cost_of_saves_and_of_steps(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    pace = auto(tmp_path)
    run(pace, clock, 1000, step_seconds=1.0, stall=1.0)
    few = pace.steps
    run(pace, clock, 3000, step_seconds=1.0, stall=20.0, began=1000)
    assert pace.steps > 3 * few
    many = pace.steps
    run(pace, clock, 3000, step_seconds=0.25, stall=20.0, began=4000)
    assert pace.steps > 3 * many


def test_it_never_saves_less_often_than_the_bound(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    pace = auto(tmp_path, failures_per_hour=1e-6, seconds_max=600.0)
    saved = run(pace, clock, 5000, step_seconds=1.0, stall=1.0)
    assert np.diff(saved).max() <= 600
    assert "longest time allowed" in pace.reason


def test_a_save_is_durable_before_the_next_is_due(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    pace = auto(tmp_path, failures_per_hour=100.0)
    saved = run(pace, clock, 5000, step_seconds=1.0, stall=0.01, durable=300.0)
    assert np.diff(saved[2:]).min() >= 300


def test_steps_beside_a_save_are_counted_apart(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    pace = auto(tmp_path)
    for step in range(1, 101):
        clock.now += 1.5 if step % 2 else 1.0
        pace.due(step, is_saving=bool(step % 2))
    assert (pace.step_seconds, pace.step_seconds_during) == (1.0, 1.5)
    assert pace.slowdown == pytest.approx(1 / 3)


class Round:
    """The part of a round that a pace uses."""

    def __init__(self):
        self.proposal = self.announcement = None
        self.has_left = self.has_failed = False
        self.label, self.rank, self.timeout_seconds = "a save", 0, 60.0


def save_on_ranks(paces, outcomes):
    """Saves on all ranks.

    Args:
        paces: Those of the ranks, the coordinator's first.
        outcomes: For each rank whether its call enters the round; the save succeeds if all do.

    Returns:
        The rounds, which the save has left but for what `succeed` does.
    """
    rounds = [Round() for _ in paces]
    for pace, one, enters in zip(paces, rounds, outcomes, strict=True):
        if enters:
            pace.entered(one)
    return rounds


def succeed(rounds):
    for one in rounds:
        one.announcement = rounds[0].proposal


def test_ranks_agree_though_their_clocks_differ(tmp_path, monkeypatch):
    """1,000 decisions of 4 ranks, one of them slow, each with a clock of its own.

    Some saves fail on all ranks, some calls fail on one rank alone, some saves are left out, and
    members hear of a success late.
    """
    random.seed(1)
    clocks = [Clock() for _ in range(4)]
    paces = []
    for clock in clocks:
        monkeypatch.setattr(module.time, "perf_counter", lambda clock=clock: clock.now)
        paces.append(auto(tmp_path, failures_per_hour=300.0))
    saves, late = 0, []
    for step in range(1, 1001):
        answers = []
        for rank, (pace, clock) in enumerate(zip(paces, clocks, strict=True)):
            monkeypatch.setattr(module.time, "perf_counter", lambda clock=clock: clock.now)
            clock.now += random.uniform(0.5, 1.5) * (5 if rank == 3 else 1)
            answers.append(pace.due(step, is_saving=random.random() < 0.3))
        assert len(set(answers)) == 1, (step, answers)
        if answers[0] and random.random() < 0.9:
            # The save before ends at the latest when this one begins.
            for one in late:
                one()
            enters = [random.random() < 0.95 for _ in range(4)]
            rounds = save_on_ranks(paces, enters)
            late = [lambda rounds=rounds: [setattr(one, "has_left", True) for one in rounds]]
            if all(enters) and random.random() < 0.8:
                saves += 1
                late.insert(0, lambda rounds=rounds: succeed(rounds))
                paces[0].saved(random.uniform(0.5, 2.0), random.uniform(2.0, 4.0))
        elif answers[0]:
            for one in late:
                one()
            late = []
    assert saves > 10
    assert len({pace.steps for pace in paces}) == 1
    assert paces[0].steps != FIRST_STEPS


def test_ranks_agree_after_one_save_and_many_left_out(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    paces = [auto(tmp_path), auto(tmp_path)]
    rounds = []
    for step in range(1, 401):
        clock.now += 1
        answers = [pace.due(step, is_saving=False) for pace in paces]
        assert answers[0] == answers[1], step
        if answers[0] and not rounds:
            rounds = save_on_ranks(paces, [True, True])
            paces[0].saved(5.0, 5.0)
            succeed(rounds)
            for one in rounds:
                one.has_left = True


def test_a_resume_never_fails_for_its_history(tmp_path, monkeypatch):
    training = penstock.Training(losses=[])
    penstock.CheckpointStore(tmp_path).save(7, training)

    def fail(*_, **__):
        raise OverflowError

    monkeypatch.setattr(module, "summarize", fail)
    store = penstock.CheckpointStore(tmp_path, save_every="auto")
    assert store.resume(training) == 7


class Gone:
    """A store whose process has died."""

    def __getattr__(self, name):
        def fail(*_):
            raise RuntimeError("Broken pipe")

        return fail


def test_a_round_whose_store_is_gone_is_left():
    one = ranks_round.Round(
        Mailbox(Gone(), "of"),
        0,
        "step 1",
        order=1,
        rank=1,
        global_ranks=(0, 1),
        timeout_seconds=1.0,
        neighbours=None,
    )
    one.abort(OSError("no space"))
    assert one.has_left


def in_flight(tmp_path, monkeypatch):
    """A pace whose first save is in flight when the third answer is due."""
    clock = Clock(monkeypatch)
    pace, one = auto(tmp_path), Round()
    one.timeout_seconds = 0.0
    for step in range(1, 3 * FIRST_STEPS):
        clock.now += 1
        if pace.due(step, is_saving=True) and step == FIRST_STEPS:
            pace.entered(one)
    return pace, one


def test_a_save_that_never_ends_is_an_error(tmp_path, monkeypatch):
    pace, _ = in_flight(tmp_path, monkeypatch)
    with pytest.raises(RankError, match="has not ended"):
        pace.due(3 * FIRST_STEPS, is_saving=True)


def test_a_save_that_has_failed_is_not_waited_for(tmp_path, monkeypatch):
    pace, one = in_flight(tmp_path, monkeypatch)
    one.has_failed = True
    assert pace.due(3 * FIRST_STEPS, is_saving=False)


def test_a_fork_does_not_wait_for_a_save_of_its_parent(tmp_path, monkeypatch):
    pace, _ = in_flight(tmp_path, monkeypatch)
    child = os.fork()
    if child == 0:
        # Raises RankError if it waits.
        status = 1
        try:
            status = 0 if pace.due(3 * FIRST_STEPS, is_saving=False) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_number_of_a_failed_save_is_not_used(tmp_path, monkeypatch):
    """Rank 0 has measured, and its next save is refused: rank 1 never hears the number."""
    clock = Clock(monkeypatch)
    paces = [auto(tmp_path), auto(tmp_path)]
    for step in range(1, 101):
        clock.now += 1
        answers = [pace.due(step, is_saving=False) for pace in paces]
        assert answers[0] == answers[1], step
        if answers[0]:
            rounds = save_on_ranks(paces, [True, True])
            for one in rounds:
                one.has_left = True
            paces[0].saved(5.0, 5.0)
    assert [pace.steps for pace in paces] == [FIRST_STEPS, FIRST_STEPS]


def test_a_return_to_an_older_step_counts_from_there(tmp_path):
    store = penstock.CheckpointStore(tmp_path, save_every=10)
    assert [step for step in range(1, 101) if store.due(step)][-1] == 100
    assert [step for step in range(51, 81) if store.due(step)] == [60, 70, 80]


def test_the_bound_wins_over_the_hysteresis(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    pace = auto(tmp_path, failures_per_hour=1e-6, seconds_max=600.0)
    run(pace, clock, 2000, step_seconds=1.0, stall=1.0)
    # 19 % slower steps are within the hysteresis, and would exceed the bound.
    saved = run(pace, clock, 4000, step_seconds=1.19, stall=1.0, began=2000)
    assert np.diff(saved[3:]).max() * 1.19 <= 601


def test_reports_give_the_reason(tmp_path):
    with penstock.CheckpointStore(tmp_path, save_every="auto", failures_per_hour=1000.0) as store:
        reports = [
            store.save(step, {"w": np.ones(10)}) for step in range(1, 100) if store.due(step)
        ]
    assert any("steps apart" in choice for choice in reports[0].choices)


def test_a_run_begins_with_the_number_of_steps_of_the_one_before(tmp_path, monkeypatch):
    """No saves 20 steps apart again, and the failure between the runs counts."""
    clock = Clock(monkeypatch)
    for _ in range(8):
        rule = Auto(tmp_path)
        monkeypatch.setattr(module.time, "time", lambda: BEGAN + clock.now)
        rule.start(BEGAN + clock.now, 1000)
        began = rule.pace.steps
        for step in range(1001, 4000):
            clock.now += 1
            if rule.due(step, is_saving=False):
                rule.saved(BEGAN + clock.now, 5.0, 5.0)
        clock.now += 60
    assert began == pytest.approx(best_period(5.0, 3000.0) - 5.0, rel=0.35)


def lost_seconds(tmp_path, phases, seeds, step_seconds=30.0):
    """Lost seconds of ``"auto"`` for each seed, and of each fixed number of steps."""
    few, *_, many = sorted(best_steps(phase, step_seconds) for phase in phases)
    grid = {round(steps) for steps in np.geomspace(few / 1.1, many * 1.1, 6)}
    for factor in (1 / 5, 5):
        grid |= {best_steps(phase, step_seconds, factor) for phase in phases}
    jobs = [Job(phases, step_seconds, seed) for seed in range(seeds)]
    fixed = {steps: np.array([job.lost(Fixed(steps)) for job in jobs]) for steps in grid}
    paths = [tmp_path / str(seed) for seed in range(seeds)]
    for path in paths:
        path.mkdir()
    auto = [job.lost(Auto(path)) for job, path in zip(jobs, paths, strict=True)]
    return np.array(auto), fixed


CHANGES = {
    "failures four times as often, cheaper saves": [
        Phase(mtbf=14_400, stall=30, durable=120),
        Phase(mtbf=3600, stall=5, durable=20),
    ],
    "failures a fourth as often, dearer saves": [
        Phase(mtbf=3600, stall=5, durable=20),
        Phase(mtbf=14_400, stall=30, durable=120),
    ],
    "failures four times as often, dearer saves": [
        Phase(mtbf=14_400, stall=10, durable=30),
        Phase(mtbf=3600, stall=40, durable=80),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_it_loses_hardly_more_than_the_best_fixed_number(tmp_path, change):
    """Nothing is given: neither the failures, nor the cost of saves, nor that both change.

    Failures come five to twenty times as often as by published rates. The best fixed number is
    found afterwards, from the same failures.
    """
    phases = CHANGES[change]
    auto, fixed = lost_seconds(tmp_path, phases, seeds=8)
    best = min(fixed.values(), key=np.mean)
    assert auto.mean() / best.mean() <= 1.05
    # 2.36: 97.5 % of Student's distribution with 7 degrees of freedom. The interval of the mean.
    difference = auto - best
    margin = 2.36 * difference.std(ddof=1) / np.sqrt(difference.size)
    assert (difference.mean() + margin) / best.mean() <= 0.10
    for phase in phases:
        for factor in (1 / 5, 5):
            assert auto.mean() < fixed[best_steps(phase, 30.0, factor)].mean(), (phase, factor)
