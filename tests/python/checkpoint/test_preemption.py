"""`on_signal`: training stops with a last save, on all ranks after the same step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn

import penstock
from penstock.checkpoint import preemption
from penstock.checkpoint.ranks import stopping
from penstock.checkpoint.saving.pending import PendingSave
from penstock.errors import PenstockWarning, UnsupportedStateError


@pytest.fixture
def store(tmp_path):
    with penstock.CheckpointStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def training():
    return penstock.Training(w=np.zeros(4), step=0)


def interrupt(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def train(store, training, *, to=10, at=3, number=signal.SIGTERM, each=None, **options):
    """Runs a loop that gets a signal in the middle of a step; returns the step it left after."""
    with penstock.on_signal(store, training, **options) as preempted:
        for step in range(1, to + 1):
            if step == at:
                interrupt(number)
            training.w += step
            training.step = step
            if each is not None:
                each(step)
            if preempted.at(step):
                assert preempted.signal == number
                return step
    return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_loop_with_a_save_of_that_step(store, training, number):
    before = signal.getsignal(number)
    assert train(store, training, number=number) == 3
    assert signal.getsignal(number) == before
    assert store.steps() == [3]
    fresh = penstock.Training(w=np.zeros(4), step=0)
    assert penstock.CheckpointStore(store.root).resume(fresh) == 3
    assert fresh.step == 3
    assert fresh.w.tolist() == [6.0] * 4


def test_without_a_signal_it_changes_nothing(store, training):
    assert train(store, training, at=None) is None
    assert store.steps() == []


def test_a_function_that_makes_the_state_will_do(store):
    state = {"w": np.ones(3)}
    with penstock.on_signal(store, lambda: state, signals=[signal.SIGUSR2]) as preempted:
        interrupt(signal.SIGUSR2)
        assert preempted.at(7)
        # Asking again after the end saves nothing twice.
        assert preempted.at(8)
    assert store.steps() == [7]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_save_that_is_under_way_is_finished_and_the_step_saved_too(store, training, lazy):
    def each(step):
        if step == 2:
            store.save_async(step, training, lazy=lazy)

    assert train(store, training, each=each) == 3
    assert store.steps() == [2, 3]


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_a_step_that_is_saved_already_is_not_saved_twice(store, training, way):
    found = []

    def each(step):
        found.append(getattr(store, way)(step, training))

    assert train(store, training, each=each) == 3
    assert store.steps() == [1, 2, 3]
    report = found[-1] if way == "save" else found[-1].result()
    reports = []
    store.load(3, report=reports.append)
    assert reports[0].checkpoint_id == report.checkpoint_id


def test_a_step_that_was_resumed_from_is_not_saved_again(store, training):
    report = store.save(3, training)
    again = penstock.CheckpointStore(store.root)
    assert again.resume(training) == 3
    with penstock.on_signal(again, training) as preempted:
        interrupt()
        assert preempted.at(3)
    assert store.steps() == [3]
    reports = []
    store.load(3, report=reports.append)
    assert reports[0].checkpoint_id == report.checkpoint_id


def test_a_run_that_went_back_is_saved_at_a_step_that_it_comes_to_again(store, training):
    for step in (1, 2):
        training.step = step
        store.save(step, training)
    store.delete(2)
    assert store.resume(training) == 1
    with penstock.on_signal(store, training) as preempted:
        interrupt()
        assert preempted.at(2)
    assert store.steps() == [1, 2]


def test_where_another_save_would_take_too_long_only_the_last_one_is_finished(store, training):
    def each(step):
        if step == 2:
            report = store.save(step, training)
            # Simulates slow storage.
            store._saver._last.report = type(report)(
                **{name: getattr(report, name) for name in report.__slots__} | {"seconds": 100.0}
            )

    with pytest.warns(PenstockWarning, match=r"step 3 is not saved: a save takes 100.0 s"):
        assert train(store, training, each=each) == 3
    assert store.steps() == [2]


def test_a_save_that_outlasts_the_time_of_grace_is_given_up(store, training, monkeypatch):
    result = PendingSave.result

    def slow(self, timeout_seconds=None):
        if timeout_seconds is not None:
            raise TimeoutError
        return result(self)

    monkeypatch.setattr(PendingSave, "result", slow)
    with pytest.warns(PenstockWarning, match="step 3 is not saved: the save has not"):
        assert train(store, training) == 3


def test_a_failed_save_before_is_told_and_does_not_keep_from_the_last_one(store, training):
    def each(step):
        if step == 2:
            store.save_async(step, training).cancel()
            store._saver._last.pending._done.wait()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert train(store, training, each=each) == 3
    assert 3 in store.steps()
    # Reported once, by the error of the save itself.
    assert all(str(one.message).count("is not saved") <= 1 for one in told)


def test_the_handler_of_others_is_called_and_comes_back(store, training):
    calls = []

    def other(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGTERM, other)
    try:
        assert train(store, training) == 3
        assert calls == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is other
        # A handler installed inside the block is left alone.
        with penstock.on_signal(store, training):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_it_stops_at_a_ctrl_c_where_that_is_asked_for(store, training):
    assert train(store, training, number=signal.SIGINT, signals=[signal.SIGINT]) == 3
    assert store.steps() == [3]


def test_what_cannot_work_is_refused(store, training):
    found = []

    def elsewhere():
        try:
            penstock.on_signal(store, training)
        except penstock.PenstockError as error:
            found.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in found[0]
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ValueError, match="cannot be caught"):
        penstock.on_signal(store, training, signals=[signal.SIGUSR1, signal.SIGKILL])
    assert signal.getsignal(signal.SIGUSR1) == before
    with pytest.raises(ValueError, match="must be positive"):
        penstock.on_signal(store, training, grace_seconds=0)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"grace_seconds": float("inf")}, ValueError, "positive and finite"),
        ({"grace_seconds": float("nan")}, ValueError, "positive and finite"),
        ({"grace_seconds": 1e300}, ValueError, "positive and finite"),
        ({"grace_seconds": -1}, ValueError, "positive and finite"),
        ({"grace_seconds": "30"}, TypeError, "number of seconds"),
        ({"signals": "SIGTERM"}, TypeError, "is no signal"),
        ({"signals": 1.5}, TypeError, "is no signal"),
        ({"store": "directory"}, TypeError, "no CheckpointStore"),
        ({"training": nn.Linear(2, 2)}, TypeError, "is a model"),
        ({"training": {"w": 1}}, TypeError, "neither a Training nor a function"),
        ({"training": lambda step: {}}, TypeError, "without arguments"),
    ],
)
def test_what_would_lose_the_last_save_is_refused_at_once(store, training, wrong, error, text):
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    given = {"store": store, "training": training} | wrong
    with pytest.raises(error, match=text):
        penstock.on_signal(given.pop("store"), given.pop("training"), **given)
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before


@pytest.mark.parametrize("signals", [signal.SIGTERM, [signal.SIGTERM, signal.SIGTERM]])
def test_one_signal_will_do(store, training, signals):
    assert train(store, training, signals=signals) == 3
    assert store.steps() == [3]


def test_a_last_save_that_failed_is_tried_again(store, training):
    calls = []

    def state():
        calls.append(None)
        return {"w": object()} if len(calls) == 1 else {"w": training.w}

    with penstock.on_signal(store, state) as preempted:
        interrupt()
        with pytest.raises(UnsupportedStateError):
            preempted.at(1)
        assert preempted.at(2)
        assert preempted.at(3)
    assert store.steps() == [2]


@pytest.mark.parametrize("count", [2, 3])
def test_what_was_closed_in_any_order_takes_no_signal(store, training, count):
    calls = []
    unused = signal.getsignal(signal.SIGUSR1)
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        found = [penstock.on_signal(store, training) for _ in range(count)]
        for one in found[:-1]:
            one.close()
        interrupt()
        # The innermost open block handles it, whatever happens to outer ones.
        assert found[-1].signal == signal.SIGTERM
        calls.clear()
        found[-1].close()
        interrupt()
        assert calls == [signal.SIGTERM]
        assert [one.signal for one in found[:-1]] == [None] * (count - 1)
        # Frameworks keep an existing handler, as Lightning does for SLURM's signals.
        assert signal.getsignal(signal.SIGUSR1) == unused
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_may_close_it(store, training):
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        preempted = penstock.on_signal(store, training)
        with ThreadPoolExecutor(1) as executor:
            executor.submit(preempted.close).result()
        interrupt()
        assert calls == [signal.SIGTERM]
        assert preempted.signal is None
    finally:
        signal.signal(signal.SIGTERM, before)


def end_by_signal(root, count):
    store = penstock.CheckpointStore(root)
    found = [penstock.on_signal(store, penstock.Training(step=0)) for _ in range(count)]
    for one in found:
        one.close()
    interrupt()
    os._exit(7)


def test_a_signal_ends_the_process_when_all_is_closed(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=end_by_signal, args=(tmp_path, 3))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def sleep_for_long():
    time.sleep(100)


def test_processes_that_are_forked_meanwhile_still_end_at_a_signal(store, training):
    with penstock.on_signal(store, training):
        process = multiprocessing.get_context("fork").Process(target=sleep_for_long)
        process.start()
        try:
            process.terminate()
            process.join(60)
            assert process.exitcode == -signal.SIGTERM
        finally:
            process.kill()
            process.join()


# On many ranks.


def train_together(root, signalled, steps=12, grace_seconds=30, late_rank=None):
    """All ranks run every step; one of them is signalled during a chosen step."""
    rank = dist.get_rank()
    store = penstock.CheckpointStore(root)
    training = penstock.Training(step=0, own=rank)
    with penstock.on_signal(store, training, grace_seconds=grace_seconds) as preempted:
        for step in range(1, steps + 1):
            if signalled.get(rank) == step:
                interrupt()
            # A synchronous step: no rank ends it before all have started it.
            dist.barrier()
            if late_rank == rank:
                time.sleep(0.05)
            training.step = step
            if preempted.at(step):
                return step, store.steps(), preempted.signal
    return None, store.steps(), preempted.signal


@pytest.mark.parametrize("signalled", [{0: 3}, {1: 3}, {0: 3, 1: 4}, {0: 5, 1: 4, 2: 6, 3: 4}])
def test_all_ranks_stop_after_the_same_step_whoever_gets_the_signal(jobs, tmp_path, signalled):
    ranks = 2 if len(signalled) < 4 else 4
    found = jobs.of(ranks).call(train_together, tmp_path, signalled)
    last = {step for step, _, _ in found}
    (step,) = last
    assert min(signalled.values()) < step <= min(signalled.values()) + 2
    assert [steps for _, steps, _ in found] == [[step]] * ranks
    for rank, (_, _, number) in enumerate(found):
        assert (number is None) == (signalled.get(rank, 99) > step)


def test_ranks_without_a_signal_train_to_the_end(jobs, tmp_path):
    assert jobs.of(2).call(train_together, tmp_path, {}) == [(None, [], None)] * 2


def test_a_rank_that_is_slower_than_the_others_is_waited_for(jobs, tmp_path):
    found = jobs.of(2).call(train_together, tmp_path, {0: 3}, 12, 30, 1)
    assert len({step for step, _, _ in found}) == 1
    assert found[0][1] == [found[0][0]]


def run_ahead(root, lead, wait_seconds):
    """Rank 1 queues device work and runs steps ahead of rank 0."""
    stopping._WAIT_SECONDS_MIN = wait_seconds
    rank = dist.get_rank()
    places = dist.distributed_c10d._get_default_store()
    store = penstock.CheckpointStore(root)
    training = penstock.Training(step=0)
    try:
        with penstock.on_signal(store, training) as preempted:
            for step in range(1, 100):
                places.set(f"{root}/{rank}/{step}", "here")
                before = step - (lead if rank == 1 else 0)
                if before > 0:
                    places.wait([f"{root}/{1 - rank}/{before}"], timedelta(seconds=30))
                if rank == 0 and step == 4:
                    places.wait([f"{root}/1/{step + lead}"], timedelta(seconds=30))
                    interrupt()
                training.step = step
                if preempted.at(step):
                    return step, store.steps()
    finally:
        stopping._WAIT_SECONDS_MIN = 0.5
    return None, store.steps()


@pytest.mark.parametrize("lead", [1, 2, 5])
def test_a_rank_that_is_steps_ahead_stops_after_the_same_step(jobs, tmp_path, lead):
    one, other = jobs.of(2).call(run_ahead, tmp_path, lead, 0.05)
    assert one == other
    assert one[0] is not None
    assert one[1] == [one[0]]


def stop_alone(root):
    """Rank 1 never asks."""
    if dist.get_rank() == 1:
        return None
    store = penstock.CheckpointStore(root)
    training = penstock.Training(step=0)
    with penstock.on_signal(store, training, grace_seconds=1) as preempted:
        interrupt()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = next(step for step in range(1, 10_000) if preempted.at(step))
    return step, [str(one.message) for one in told], store.steps()


def test_a_rank_that_never_asks_ends_the_wait_with_the_time_of_grace(jobs, tmp_path):
    job = jobs.of(2)
    try:
        found, _ = job.call(stop_alone, tmp_path)
        _, told, steps = found
        assert steps == []
        assert "is not saved" in told[0]
    finally:
        # The ranks have called on_signal a different number of times.
        job.is_broken = True
