"""Ranks disagree, fail, die or hang: all raise in time, nothing is committed, ranks recover."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time

import pytest
import torch
from torch.distributed.tensor import Shard

import penstock
from compare import assert_same
from dtensors import GRID, LINE, Layout, plain, rank, sharded, values
from penstock.checkpoint.ranks.group import Ranks
from penstock.checkpoint.ranks.round import Round
from penstock.checkpoint.saving.save import Save
from penstock.errors import CheckpointExistsError, RankError, UnsupportedStateError
from ranks import IMPATIENT, TIMEOUT_SECONDS, Job

MIB = 1 << 20
# The longest that ranks wait for the coordinator, with time for a busy machine.
BOUND_SECONDS = 3 * TIMEOUT_SECONDS + 45

PATIENT = penstock.Options(rank_timeout_seconds=60)
"""Ranks wait for a missing rank longer than any machine needs to start one."""

ROWS = Layout(LINE, [Shard(0)], (40, 6))
CELLS = Layout(GRID, [Shard(0), Shard(1)], (9, 5))


def state(step):
    return {
        "rows": sharded(f"rows{step}", ROWS),
        "cells": sharded(f"cells{step}", CELLS),
        "plain": plain(rank(), str(step)),
        "step": step,
    }


def whole(step):
    return {"rows": values(f"rows{step}", ROWS.shape), "cells": values(f"cells{step}", CELLS.shape)}


# Functions that run on every rank.


def save(root, step):
    penstock.CheckpointStore(root, options=IMPATIENT).save(step, state(step))


def save_over(path, step):
    penstock.save(path, state(step), step=step, overwrite=True, options=IMPATIENT)


def save_async(root, step):
    penstock.CheckpointStore(root, options=IMPATIENT).save_async(step, state(step)).result()


def save_with_trouble(root, step, culprit, trouble, options=IMPATIENT):
    """Saves with trouble on one rank; returns the error and the seconds until it was raised."""
    began = time.monotonic()
    error = None
    with TROUBLES[trouble](root, step) if rank() == culprit else whole_job(root, step) as arguments:
        try:
            root, step, one = arguments
            penstock.CheckpointStore(root, options=options).save(step, one)
        except penstock.PenstockError as caught:
            error = caught
    return error, time.monotonic() - began


@contextlib.contextmanager
def whole_job(root, step):
    yield root, step, state(step)


def without_a_tensor(root, step):
    one = state(step)
    del one["rows"]
    return contextlib.nullcontext((root, step, one))


def with_another_tensor(root, step):
    return contextlib.nullcontext(
        (root, step, {**state(step), "more": sharded("more", CELLS)}),
    )


def with_another_dtype(root, step):
    other = sharded("rows", ROWS._replace(dtype=torch.int32))
    return contextlib.nullcontext((root, step, {**state(step), "rows": other}))


def with_another_shape(root, step):
    other = sharded("rows", ROWS._replace(shape=(40, 7)))
    return contextlib.nullcontext((root, step, {**state(step), "rows": other}))


def with_other_placements(root, step):
    other = sharded("rows", ROWS._replace(placements=[Shard(1)]))
    return contextlib.nullcontext((root, step, {**state(step), "rows": other}))


def with_another_step(root, step):
    return contextlib.nullcontext((root, step + 1, state(step)))


def with_a_root_that_is_not_there(root, step):
    return contextlib.nullcontext((root.with_name("elsewhere"), step, state(step)))


def with_a_root_of_its_own(root, step):
    other = root.with_name("other")
    (other / f"step-{step:010}").mkdir(parents=True, exist_ok=True)
    return contextlib.nullcontext((other, step, state(step)))


def with_what_cannot_be_stored(root, step):
    return contextlib.nullcontext((root, step, {**state(step), "code": open}))


@contextlib.contextmanager
def with_a_disk_that_is_full(root, step):
    """Stands in for a full disk: files may not grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, before[1]))
    try:
        yield root, step, state(step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


TROUBLES = {
    name: value for name, value in list(globals().items()) if name.startswith(("with_", "without_"))
}


def files_of(root):
    return sorted(path.relative_to(root) for path in root.rglob("*"))


def assert_goes_on(job, root, before, step):
    """Checks that nothing of the attempt is left, and that the next save of all ranks succeeds."""
    store = penstock.CheckpointStore(root)
    assert files_of(root) == before
    job.call(save, root, step)
    assert store.latest() == step
    assert penstock.verify(store.path(step)).ok
    assert_same(store.load(step, keys=["rows", "cells"]), whole(step))


# Ranks that disagree or fail.


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("trouble", list(TROUBLES))
def test_where_one_rank_cannot_save_all_raise_and_nothing_is_committed(
    jobs, disk_path, trouble, culprit
):
    job, root = jobs.of(4), disk_path / "store"
    job.call(save, root, 1)
    before = files_of(root)
    for error, seconds in job.call(save_with_trouble, root, 2, culprit, trouble):
        assert isinstance(error, penstock.PenstockError)
        assert seconds < BOUND_SECONDS
    for other in (root.with_name("other"), root.with_name("elsewhere")):
        assert not any(path.is_file() for path in other.rglob("*"))
    assert_goes_on(job, root, before, 2)


def save_late_what_cannot_be_stored(root, step, late):
    """One rank fails at once; some ranks arrive after that."""
    if rank() in late:
        time.sleep(1)
    return save_with_trouble(root, step, 2, "with_what_cannot_be_stored", PATIENT)


@pytest.mark.quick
@pytest.mark.parametrize("late", [[], [0], [1, 3]], ids=["together", "coordinator", "members"])
def test_the_others_are_told_who_failed_and_why_and_do_not_wait(jobs, disk_path, late):
    job, root = jobs.of(4), disk_path / "store"
    job.call(save, root, 1)
    found = job.call(save_late_what_cannot_be_stored, root, 2, late)
    assert isinstance(found[2][0], UnsupportedStateError)
    for number in (0, 1, 3):
        error, seconds = found[number]
        assert isinstance(error, RankError)
        assert error.rank == 2
        assert "rank 2" in str(error)
        assert "code" in str(error)
        assert seconds < PATIENT.rank_timeout_seconds / 2


@pytest.mark.parametrize("function", [save, save_async])
def test_a_step_that_exists_is_refused_on_every_rank(jobs, disk_path, function):
    job, root = jobs.of(4), disk_path / "store"
    job.call(save, root, 1)
    before = files_of(root)
    for error in job.outcomes(function, root, 1):
        assert isinstance(error, CheckpointExistsError)
    assert_goes_on(job, root, before, 2)


def test_a_rank_that_left_saves_out_comes_back(jobs, disk_path):
    """After it skipped one save, and after so many that the first messages are forgotten."""
    job, root = jobs.of(4), disk_path / "store"
    job.call(save, root, 1)
    before = files_of(root)
    for step in (2, 3, 4):
        for error in job.outcomes(save, root, step, ranks=[0, 1, 3]):
            assert isinstance(error, RankError)
            assert error.rank == 2
    assert_goes_on(job, root, before, 5)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_left_a_save_of_one_path_out_comes_back(jobs, disk_path, absent):
    """At the latest with the save after the next: until then it may only be late."""
    job, path = jobs.of(4), disk_path / "newest"
    job.call(save_over, path, 1)
    for error in job.outcomes(save_over, path, 2, ranks={0, 1, 2, 3} - {absent}):
        assert isinstance(error, RankError)
        assert error.rank == absent
    job.outcomes(save_over, path, 3)
    job.call(save_over, path, 4)
    assert_same(penstock.load(path, keys=["rows", "cells"]), whole(4))


# Ranks that die or hang.


def save_and_signal(root, step, culprit, moment, number):
    """Sends a signal to a rank just before a call of the protocol."""
    if rank() == culprit:
        owner = {"_commit": Save, "enter": Ranks}.get(moment, Round)
        ordinary = getattr(owner, moment)

        def strike(*arguments, **named):
            setattr(owner, moment, ordinary)
            os.kill(os.getpid(), number)
            # `os.kill` may return before the signal takes effect.
            time.sleep(1)
            return ordinary(*arguments, **named)

        setattr(owner, moment, strike)
    save(root, step)


def save_much(root, step):
    """Saves slowly: one request after the other."""
    options = penstock.Options(
        engine="threads",
        queue_depth=1,
        io_threads=1,
        extent_bytes=MIB,
        rank_timeout_seconds=TIMEOUT_SECONDS,
    )
    store = penstock.CheckpointStore(root, options=options)
    store.save(step, {"own": penstock.PerRank(torch.full((64 * MIB // 4,), float(rank())))})


def outcomes_of_others(job, ranks):
    began = time.monotonic()
    found = job.finish(ranks=ranks, timeout_seconds=60)
    assert time.monotonic() - began < BOUND_SECONDS
    return found


DEATHS = [(2, "cast", True), (0, "post_begun", True), (0, "_commit", True), (0, "_commit", False)]


def assert_step_1_is_all(root):
    store = penstock.CheckpointStore(root)
    assert store.steps() == [1]
    assert_same(store.load(keys=["rows", "cells"]), whole(1))
    store.sweep()
    assert [info.step for info in store.scan()] == [1]


@pytest.mark.parametrize(
    ("victim", "moment", "is_hosted"),
    DEATHS,
    ids=[f"{victim}-{moment}-{'hosted' if own else 'of-rank-0'}" for victim, moment, own in DEATHS],
)
def test_where_a_rank_dies_the_others_raise_and_nothing_is_committed(
    disk_path, victim, moment, is_hosted
):
    root = disk_path / "store"
    job = Job(is_hosted=is_hosted)
    try:
        job.call(save, root, 1)
        job.start(save_and_signal, root, 2, victim, moment, signal.SIGKILL)
        others = [number for number in range(4) if number != victim]
        for error in outcomes_of_others(job, others):
            assert isinstance(error, RankError)
    finally:
        job.is_broken = True
        job.close()
    assert_step_1_is_all(root)


def test_where_the_coordinator_dies_after_the_commit_the_step_is_there(disk_path):
    """The others get no message, and look at the directory themselves."""
    root = disk_path / "store"
    job = Job()
    try:
        job.start(save_and_signal, root, 1, 0, "post_outcome", signal.SIGKILL)
        assert outcomes_of_others(job, [1, 2, 3]) == [None] * 3
    finally:
        job.is_broken = True
        job.close()
    store = penstock.CheckpointStore(root)
    store.sweep()
    assert store.verify(1).ok
    assert_same(store.load(keys=["rows", "cells"]), whole(1))


@pytest.mark.parametrize("victim", [0, 2])
def test_where_a_rank_dies_in_the_middle_of_its_write_nothing_is_committed(disk_path, victim):
    root = disk_path / "store"
    job = Job()
    try:
        job.call(save, root, 1)
        job.start(save_much, root, 2)
        deadline = time.monotonic() + 30
        while not list(root.glob(f"step-*2/shard-{victim:05}-*")):
            assert time.monotonic() < deadline
        job.signal(victim, signal.SIGKILL)
        others = [number for number in range(4) if number != victim]
        for error in outcomes_of_others(job, others):
            assert isinstance(error, RankError)
    finally:
        job.is_broken = True
        job.close()
    assert_step_1_is_all(root)


@pytest.mark.parametrize(
    ("sleeper", "moment"),
    [(2, "enter"), (2, "cast"), (0, "post_begun")],
)
def test_a_rank_that_hangs_is_given_up_and_does_no_harm_when_it_wakes(disk_path, sleeper, moment):
    root = disk_path / "store"
    job = Job()
    try:
        job.call(save, root, 1)
        before = files_of(root)
        job.start(save_and_signal, root, 2, sleeper, moment, signal.SIGSTOP)
        others = [number for number in range(4) if number != sleeper]
        for error in outcomes_of_others(job, others):
            assert isinstance(error, RankError)
        assert penstock.CheckpointStore(root).steps() == [1]
        assert_same(penstock.CheckpointStore(root).load(keys=["rows", "cells"]), whole(1))
        job.signal(sleeper, signal.SIGCONT)
        (late,) = outcomes_of_others(job, [sleeper])
        assert isinstance(late, RankError)
        assert_goes_on(job, root, before, 2)
    finally:
        job.close()


def test_a_coordinator_that_hangs_and_wakes_commits_what_all_have_written(disk_path):
    """The others raise, as they cannot know; their files are kept for it."""
    root = disk_path / "store"
    job = Job()
    try:
        job.start(save_and_signal, root, 1, 0, "count_votes", signal.SIGSTOP)
        for error in outcomes_of_others(job, [1, 2, 3]):
            assert isinstance(error, RankError)
            assert error.rank == 0
        assert penstock.CheckpointStore(root).steps() == []
        job.signal(0, signal.SIGCONT)
        assert outcomes_of_others(job, [0]) == [None]
        assert_goes_on(job, root, files_of(root), 2)
        assert penstock.CheckpointStore(root).verify(1).ok
        assert_same(penstock.CheckpointStore(root).load(1, keys=["rows", "cells"]), whole(1))
    finally:
        job.close()
