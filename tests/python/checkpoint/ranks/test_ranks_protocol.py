"""The protocol between ranks: saves that overlap, fail, are interrupted or cancelled, in step."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
import warnings
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import penstock
from compare import assert_same, tensor_bytes
from dtensors import Layout, cleared, local_bytes, rank, sharded, values
from penstock.checkpoint.ranks.round import Round
from penstock.checkpoint.saving.save import Save
from penstock.errors import (
    PenstockWarning,
    RankError,
    SaveCancelledError,
    StateMismatchError,
    UnsupportedStateError,
)
from penstock.reports import SaveReport
from ranks import IMPATIENT, Job

LATE_SECONDS = 2
"""Delay of a late rank."""

SOON_SECONDS = 0.4
"""Delay of an interrupt of ranks that wait for a late one."""

PATIENT = penstock.Options(rank_timeout_seconds=60)
"""Options with a timeout that no test reaches: a call that ends early was notified."""

_stores: dict[str, penstock.CheckpointStore] = {}


def store_of(root, **settings):
    """Returns one store per directory for the life of the rank, as a training run has it."""
    if str(root) not in _stores:
        _stores[str(root)] = penstock.CheckpointStore(root, **settings)
    return _stores[str(root)]


def rows(name):
    """Returns a `DTensor` over the whole job."""
    return sharded(name, Layout(list(range(dist.get_world_size())), [Shard(0)], (21, 5)))


def state(name):
    """Returns a sharded tensor, a tensor equal on all ranks, and values of this rank."""
    return {
        "rows": rows(f"{name} rows"),
        "same": values(f"{name} same", (40, 50)),
        "own": values(f"{name} own {rank()}", (40, 50)),
        "few": values(f"{name} few {rank()}", (3,)),
        "rank": rank(),
    }


def whole(name, number):
    """Returns the state that one process loads for a rank."""
    return {
        "rows": values(f"{name} rows", (21, 5)),
        "same": values(f"{name} same", (40, 50)),
        "own": values(f"{name} own {number}", (40, 50)),
        "few": values(f"{name} few {number}", (3,)),
        "rank": number,
    }


def assert_holds(root, step, name, size):
    """Checks that a step is good and contains each rank's state."""
    store = penstock.CheckpointStore(root)
    assert store.verify(step).ok
    for number in range(size):
        assert_same(penstock.load(store.path(step), rank=number), whole(name, number))


class Outcome(NamedTuple):
    """The outcome of a call.

    Attributes:
        found: Returned value or raised exception.
        ended: End of the call, on the clock that all processes of the machine share.
    """

    found: Any
    ended: float


def outcome_of(call, *arguments, **settings):
    try:
        found = call(*arguments, **settings)
    except (penstock.PenstockError, KeyboardInterrupt) as error:
        found = error.with_traceback(None)
    return Outcome(found, time.monotonic())


@contextlib.contextmanager
def slow_writes(seconds_of):
    """Delays this rank's writes to some paths."""
    ordinary = Save._write

    def write(self, attempt, number):
        time.sleep(seconds_of.get(self.destination.path, 0))
        return ordinary(self, attempt, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "_write", write)
        yield


@contextlib.contextmanager
def held_writes(released):
    """Writes begin on this rank when a file is there."""
    ordinary = Save._write

    def write(self, *arguments):
        wait_for(released)
        return ordinary(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "_write", write)
        yield


def wait_for(path):
    """Waits until a file is there."""
    while not path.exists():
        time.sleep(0.01)


@contextlib.contextmanager
def interrupted(is_meant=True):
    """Sends a Ctrl-C to this process soon."""
    timer = threading.Timer(SOON_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    if is_meant:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Saves that overlap.


def save_in_two_stores(slow_root, fast_root, culprit):
    """The second store's save ends while the first one's is still running."""
    slow, fast = store_of(slow_root), store_of(fast_root)
    delay = {slow.path(1): LATE_SECONDS / 2} if rank() == culprit else {}
    with slow_writes(delay):
        pending = slow.save_async(1, state("slow"))
        fast.save(1, state("fast"))
        is_first = not pending.done()
        pending.result()
    return is_first


@pytest.mark.parametrize(("size", "culprit"), [(2, 1), (3, 0), (4, 2)])
def test_a_save_overtakes_that_of_another_store(jobs, disk_path, size, culprit):
    roots = disk_path / "slow", disk_path / "fast"
    found = jobs.of(size).call(save_in_two_stores, *roots, culprit)
    # No rank's save is complete before the slow rank has written.
    assert all(found)
    for root in roots:
        assert_holds(root, 1, root.name, size)


ROUNDS = 20


def save_in_any_order(roots, seed):
    stores = [store_of(root) for root in roots]
    for step in range(ROUNDS):
        # All ranks draw the same order of calls, and each its own delays.
        order = random.Random(f"{seed} {step}").sample(range(2), 2)
        dice = random.Random(f"{seed} {step} {rank()}")
        delays = {store.path(step): dice.choice([0, 0, 0.05, 0.1]) for store in stores}
        with slow_writes(delays):
            pending = [
                stores[index].save_async(step, state(f"{index} {step}"), lazy=dice.random() < 0.5)
                for index in order
            ]
            for one in dice.sample(pending, 2):
                one.result()


@pytest.mark.parametrize("size", [2, 4])
def test_saves_to_two_stores_end_in_any_order(jobs, disk_path, size):
    roots = [disk_path / "0", disk_path / "1"]
    jobs.of(size).call(save_in_any_order, roots, 5)
    for index, root in enumerate(roots):
        assert penstock.CheckpointStore(root).steps() == list(range(ROUNDS))
        for step in range(ROUNDS):
            assert_holds(root, step, f"{index} {step}", size)


# Plain tensors that differ between ranks.

PAIR = ["0", "both", "2", "both"]


def turned(tensor):
    """Returns the same elements in another memory order."""
    return tensor.t().contiguous().t()


def plain_state(number):
    """Returns tensors of all sizes that all ranks, some ranks or one rank hold."""
    large, small = (300, 40), (5, 3)
    one = {
        "weight": values("weight", (800, 400)),
        "bias": values("bias", (7,)),
        "own_large": values(f"own {number}", large),
        "own_small": values(f"own {number}", small),
        "own_half": values(f"own {number}", large, torch.bfloat16),
        "own_wide": values(f"own {number}", large, torch.complex128),
        "own_flags": values(f"own {number}", large, torch.bool),
        "own_number": torch.tensor(number),
        "pair_large": values(f"pair {PAIR[number]}", large),
        "pair_small": values(f"pair {PAIR[number]}", small),
        "turned_large": values("turned", large),
        "turned_small": values("turned", small),
        "turned_wide": values("turned", large, torch.complex128),
        "tied": values("tied", large),
        "again": values("tied", large),
        "empty": torch.empty(0, 3),
    }
    if number == 1:
        for name in ("turned_large", "turned_small", "turned_wide"):
            one[name] = turned(one[name])
        one["again"] = one["tied"]
    if number == 2:
        one["extra_large"] = values("extra", large)
        one["extra_small"] = values("extra", small)
        one["window"] = one["own_large"][3:90]
    return one


def save_plain(path):
    return penstock.save(path, plain_state(rank())).tensor_bytes


def load_plain(path):
    assert_same(penstock.load(path), plain_state(rank()))


def load_plain_into(path):
    into = cleared(plain_state(rank()))
    assert local_bytes(into) != local_bytes(plain_state(rank()))
    assert_same(penstock.load(path, into=into), plain_state(rank()))


def different_bytes(states):
    """Returns the bytes of all tensors; equal tensors of one name count once."""
    found = {
        (name, tensor_bytes(tensor))
        for one in states
        for name, tensor in one.items()
        # A view of another tensor, or the tensor itself.
        if name != "window"
    }
    return sum(len(data) for _, data in found)


def test_plain_tensors_that_differ_come_back_as_each_rank_had_them(jobs, disk_path):
    path, job = disk_path / "ckpt", jobs.of(4)
    written = job.call(save_plain, path)
    states = [plain_state(number) for number in range(4)]
    # Each value is written once, or once per difference.
    assert sum(written) == different_bytes(states)
    assert penstock.verify(path).ok
    job.call(load_plain, path)
    job.call(load_plain_into, path)
    for number in range(4):
        assert_same(penstock.load(path, rank=number), states[number])


def test_plain_tensors_that_all_have_are_written_by_all(jobs, disk_path):
    written = jobs.of(4).call(save_plain, disk_path / "ckpt")
    own = max(different_bytes([plain_state(number)]) for number in range(4))
    assert max(written) < own
    assert min(written) > 0


def test_one_process_gets_the_values_of_the_first_rank_and_a_warning(jobs, disk_path):
    """Each rank's own tensors are small beside a weight that all ranks hold."""
    path = disk_path / "ckpt"
    jobs.of(4).call(save_mostly_same, path)
    with pytest.warns(PenstockWarning, match="own values of 6 tensors.*rank="):
        assert_same(penstock.load(path), mostly_same(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            assert_same(penstock.load(path, rank=number), mostly_same(number))


def mostly_same(number):
    return {
        "weight": values("weight", (800, 400)),
        "large": values(f"own {number}", (60, 40)),
        "small": values(f"own {number}", (3,)),
    }


def save_mostly_same(path):
    penstock.save(path, mostly_same(rank()))


def nearly_same(number):
    """Returns zeros but for one element."""
    tensor = torch.zeros(64, 1024)
    tensor[number + 1, 77] = 1.0
    return {"zeros": tensor}


def save_nearly_same(path):
    penstock.save(path, nearly_same(rank()))


def test_plain_tensors_that_differ_in_one_element_come_back(jobs, disk_path):
    path = disk_path / "ckpt"
    jobs.of(4).call(save_nearly_same, path)
    for number in range(4):
        assert_same(penstock.load(path, rank=number), nearly_same(number))


# Groups.


def save_in_turns(root):
    """Saves in two stores, one after the other, then at the same time."""
    group = dist.new_group(list(range(dist.get_world_size())))
    stores = [
        penstock.CheckpointStore(root),
        penstock.CheckpointStore(root, process_group=group),
    ]
    for step in range(6):
        stores[step % 2].save(step, state(step))
    for step in (6, 8):
        pending = [stores[i].save_async(step + i, state(step + i)) for i in range(2)]
        # On half of the ranks the other store's save is waited for first.
        for one in pending[:: 1 if rank() % 2 else -1]:
            one.result()


def test_two_groups_of_the_same_ranks_do_not_disturb_each_other(jobs, disk_path):
    jobs.of(4).call(save_in_turns, disk_path)
    for step in range(10):
        assert_holds(disk_path, step, step, 4)


def start_again(prefix):
    """Ends the job and begins another with the same processes and the same store."""
    number, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    dist.destroy_process_group()
    if prefix:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(prefix, store), rank=number, world_size=size
        )
        return
    # Gloo would reuse the addresses of the previous job; this fake backend does not communicate.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.init_process_group("fake", store=store, rank=number, world_size=size)


def save_plainly(root, step, label="x"):
    penstock.CheckpointStore(root, options=IMPATIENT).save(
        step, {"own": values(f"{label} {step} {rank()}", (900,)), "same": values(label, (900,))}
    )


def assert_holds_plainly(root, step, size):
    for number in range(size):
        loaded = penstock.load(penstock.CheckpointStore(root).path(step), rank=number)
        assert_same(
            loaded, {"own": values(f"x {step} {number}", (900,)), "same": values("x", (900,))}
        )


def make_store(root):
    penstock.CheckpointStore(root)


def new_group_and_save(root, step):
    group = dist.new_group([1, 0])
    store = penstock.CheckpointStore(root, options=IMPATIENT, process_group=group)
    store.save(step, {"own": rank()})


def test_a_job_that_begins_again_hears_nothing_of_the_one_before(disk_path):
    job = Job(2)
    try:
        job.call(make_store, disk_path)
        # Leaves keys that no rank removes before the job ends: a rank is missing in round one.
        for error in job.outcomes(save_plainly, disk_path, 5, ranks=[0]):
            assert isinstance(error, RankError)
        job.call(new_group_and_save, disk_path, 4)
        for again, prefix in enumerate(["", "", "other", "another", ""]):
            job.call(start_again, prefix)
            # The first step is the one that failed before.
            for step in (5 + 10 * again, 6 + 10 * again):
                job.call(save_plainly, disk_path, step)
                assert_holds_plainly(disk_path, step, 2)
            job.call(new_group_and_save, disk_path, 7 + 10 * again)
    finally:
        job.close()


def save_in_a_group_and_leave_it(path):
    """Saves in a group; returns whether the group still exists afterwards."""
    group = dist.new_group([0, 1])
    penstock.save(path, {"own": rank()}, process_group=group)
    dist.destroy_process_group(group)
    left = weakref.ref(group)
    del group
    gc.collect()
    return left() is not None


def test_a_group_that_is_destroyed_is_not_kept(jobs, disk_path):
    assert jobs.of(2).call(save_in_a_group_and_leave_it, disk_path / "ckpt") == [False, False]


def save_alone_in_group(root):
    """All ranks save at the same time, each in a group of its own."""
    groups = [dist.new_group([number]) for number in range(dist.get_world_size())]
    own = root / str(rank())
    with penstock.CheckpointStore(own, process_group=groups[rank()], options=PATIENT) as store:
        report = store.save(1, {"w": values(f"w {rank()}", (900,)), "rank": rank()})
        store.save_async(2, {"w": values(f"w {rank()}", (900,))}).result()
        with slow_writes({store.path(3): SOON_SECONDS}):
            pending = store.save_async(3, {"rank": rank()})
            assert store.save_async(4, {"rank": rank()}, if_busy="skip") is None
            pending.result()
        assert store.load(fallback=True) == {"rank": rank()}
        assert_same(store.load(1)["w"], values(f"w {rank()}", (900,)))
    assert store.steps() == [1, 2, 3]
    return report.rank, report.world_size


def test_a_rank_is_alone_in_a_group_of_one(jobs, disk_path):
    assert jobs.of(4).call(save_alone_in_group, disk_path) == [(0, 1)] * 4


def save_alone_meanwhile(root):
    """One rank saves alone during a save of all ranks, while another one loads."""
    together = store_of(root / "together")
    alone = penstock.CheckpointStore(root / f"alone{rank()}", no_dist=True)
    with slow_writes({together.path(1): SOON_SECONDS} if rank() == 3 else {}):
        pending = together.save_async(1, state("together"))
        if rank() in (0, 2):
            for step in range(3):
                one = {"w": values(f"{step}", (900,)), "rank": rank()}
                assert alone.save(step, one).world_size == 1
                assert alone.save_async(step, one, overwrite=True).result().world_size == 1
                assert_same(alone.load(), one)
        pending.result()
    together.save(2, state("next"))


def test_ranks_save_alone_while_they_save_together(jobs, disk_path):
    jobs.of(4).call(save_alone_meanwhile, disk_path)
    assert_holds(disk_path / "together", 1, "together", 4)
    assert_holds(disk_path / "together", 2, "next", 4)
    for number in (0, 2):
        store = penstock.CheckpointStore(disk_path / f"alone{number}")
        assert store.steps() == [0, 1, 2]
        assert_same(store.load(), {"w": values("2", (900,)), "rank": number})


# Saves that are skipped.

SKIPPED = 40


def save_while_one_is_slow(root, first, late):
    """Returns how many saves were not skipped."""
    store = store_of(root)
    with slow_writes({store.path(first): LATE_SECONDS} if rank() == 2 else {}):
        pending = store.save_async(first, state(first))
        if rank() in late:
            # By then the others have skipped all those saves.
            time.sleep(1)
        found = [
            store.save_async(first + 1 + i, state("left out"), if_busy="skip")
            for i in range(SKIPPED)
        ]
        is_done = pending.done()
        pending.result()
    store.save(first + SKIPPED + 1, state(first + SKIPPED + 1))
    return is_done, sum(one is not None for one in found)


def test_saves_that_are_left_out_leave_no_messages_behind(jobs, disk_path):
    root, job = disk_path / "store", jobs.of(4)
    assert job.call(save_while_one_is_slow, root, 0, []) == [(False, 0)] * 4
    keys = job.store.num_keys()
    assert job.call(save_while_one_is_slow, root, 100, [1, 3]) == [(False, 0)] * 4
    assert job.store.num_keys() <= keys
    last = SKIPPED + 1
    assert penstock.CheckpointStore(root).steps() == [0, last, 100, 100 + last]
    for step in (0, last, 100, 100 + last):
        assert_holds(root, step, step, 4)


# Saves that fail on one rank.


def save_with_what_cannot_be_stored(root, step, culprit, late_seconds):
    """Saves an unsupported value on one rank, twice; then all ranks save something else."""
    store, one = store_of(root, options=IMPATIENT), state(step)
    if rank() == culprit:
        one["code"] = open
    else:
        time.sleep(late_seconds)
    outcomes = [outcome_of(store.save, step, one)]
    if rank() != culprit:
        time.sleep(late_seconds)
    outcomes.append(outcome_of(lambda: store.save_async(step + 1, one).result()))
    store.save(step + 2, state(step + 2))
    store.save_async(step + 3, state(step + 3)).result()
    return outcomes


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("late_seconds", [0, 0.5], ids=["together", "late"])
def test_ranks_go_on_in_step_after_saves_that_one_could_not_do(
    jobs, disk_path, late_seconds, culprit
):
    root, job = disk_path / "store", jobs.of(4)
    found = job.call(save_with_what_cannot_be_stored, root, 10, culprit, late_seconds)
    for number, outcomes in enumerate(found):
        for error, _ in outcomes:
            if number == culprit:
                assert type(error) is UnsupportedStateError
            else:
                assert type(error) is RankError
                assert error.rank == culprit
                assert "code" in str(error)
    assert penstock.CheckpointStore(root).steps() == [12, 13]
    for step in (12, 13):
        assert_holds(root, step, step, 4)


def save_after_own_failure(root, culprit, name):
    """A save that succeeds on all other ranks fails on one, whose result is not fetched."""
    store = store_of(root, options=IMPATIENT)
    with pytest.MonkeyPatch.context() as patch:
        if rank() == culprit:
            patch.setattr(Save, "run", broken_at_the_end)
        store.save_async(1, state(1))
        store._saver._last.pending._done.wait()
    outcome = outcome_of(getattr(store, name), 2, state(2))
    for step in (3, 4):
        store.save_async(step, state(step)).result()
    return outcome


def broken_at_the_end(*arguments):
    ordinary_run(*arguments)
    raise StateMismatchError("broken on purpose", path="nowhere")


ordinary_run = Save.run


@pytest.mark.parametrize("name", ["save_async", "save"])
@pytest.mark.parametrize("culprit", [0, 2])
def test_what_failed_on_one_rank_alone_is_told_by_its_next_save(jobs, disk_path, culprit, name):
    root, job = disk_path / "store", jobs.of(4)
    found = job.call(save_after_own_failure, root, culprit, name)
    for number, (error, _) in enumerate(found):
        if number == culprit:
            assert type(error) is StateMismatchError
            assert "on purpose" in str(error)
        else:
            assert type(error) is RankError
            assert error.rank == culprit
            # It was notified: it did not wait for a timeout.
            assert "on purpose" in str(error)
    for step in (1, 3, 4):
        assert_holds(root, step, step, 4)


def save_after_a_call_that_is_refused(root, culprit):
    """One rank's call raises before it contacts the others."""
    store = store_of(root, options=IMPATIENT)
    note = {"code": open} if rank() == culprit else None
    outcomes = [outcome_of(store.save, 1, state(1), metadata=note)]
    return outcomes + [outcome_of(store.save, step, state(step)) for step in range(2, 6)]


@pytest.mark.parametrize("culprit", [0, 2])
def test_ranks_are_in_step_again_after_one_has_left_a_save_out(jobs, disk_path, culprit):
    """At the latest with the third save after it."""
    root, job = disk_path / "store", jobs.of(4)
    found = job.call(save_after_a_call_that_is_refused, root, culprit)
    for number, outcomes in enumerate(found):
        refused = UnsupportedStateError if number == culprit else RankError
        assert type(outcomes[0].found) is refused
    for outcomes in found:
        for outcome in outcomes[-2:]:
            assert isinstance(outcome.found, SaveReport), outcome
    for step in (4, 5):
        assert_holds(root, step, step, 4)


# Ctrl-C.


def save_interrupted(root, step, name, victim, culprit, is_late):
    """One rank arrives or writes late; another one is interrupted while it waits for that."""
    store, released = store_of(root, options=PATIENT), root.with_name("released")
    if rank() == culprit and is_late:
        wait_for(released)
    is_held = rank() == culprit and not is_late
    with (
        held_writes(released) if is_held else contextlib.nullcontext(),
        interrupted(rank() == victim),
    ):
        return outcome_of(getattr(store, name), step, state(step)).found


INTERRUPTED = [
    ("save", 0, 1, True),
    ("save", 2, 0, True),
    ("save", 0, 1, False),
    ("save", 2, 1, False),
    ("save_async", 0, 1, True),
    ("save_async", 2, 0, True),
]


@pytest.mark.parametrize(("name", "victim", "culprit", "is_late"), INTERRUPTED)
def test_a_rank_that_waits_for_others_can_be_interrupted(
    jobs, disk_path, name, victim, culprit, is_late
):
    root, job = disk_path / "store", jobs.of(4)
    job.call(save_step, root, 1)
    others = [number for number in range(4) if number != culprit]
    job.start(save_interrupted, root, 2, name, victim, culprit, is_late)
    # Nobody waits for the slow one, which has nothing to wait for when it is there.
    found = dict(zip(others, job.finish(ranks=others), strict=True))
    root.with_name("released").touch()
    (found[culprit],) = job.finish(ranks=[culprit])
    for number, error in found.items():
        if number == victim:
            assert type(error) is KeyboardInterrupt
        else:
            assert type(error) is RankError
            assert error.rank == victim
            assert f"rank {victim} failed" in str(error)
    job.call(save_step, root, 3)
    assert penstock.CheckpointStore(root).steps() == [1, 3]
    assert_holds(root, 3, 3, 4)


def save_step(root, step):
    store_of(root, options=PATIENT).save(step, state(step))


def interrupt_result(root, step, victim, culprit):
    store = store_of(root)
    with slow_writes({store.path(step): LATE_SECONDS / 2} if rank() == culprit else {}):
        pending = store.save_async(step, state(step))
        with interrupted(rank() == victim):
            outcome = outcome_of(pending.result)
        is_done = pending.done()
        pending.result()
    return outcome.found, is_done


@pytest.mark.parametrize("victim", [0, 2])
def test_an_interrupted_wait_for_the_result_leaves_the_save_alone(jobs, disk_path, victim):
    root, job = disk_path / "store", jobs.of(4)
    found = job.call(interrupt_result, root, 1, victim, 1)
    for number, (result, is_done) in enumerate(found):
        if number == victim:
            assert type(result) is KeyboardInterrupt
            assert not is_done
        else:
            assert result.rank == number
    job.call(save_step, root, 2)
    for step in (1, 2):
        assert_holds(root, step, step, 4)


# Saves that are cancelled.


def cancel_one(root, step, victim, culprit, lazy):
    """One rank cancels its save while it waits for another."""
    store = store_of(root)
    with slow_writes({store.path(step): LATE_SECONDS / 2} if rank() == culprit else {}):
        pending = store.save_async(step, state(step), lazy=lazy)
        if rank() == victim:
            time.sleep(SOON_SECONDS)
            # All ranks but one have voted by now.
            assert not pending.done()
            pending.cancel()
        return outcome_of(pending.result)


@pytest.mark.parametrize(
    ("victim", "culprit"), [(0, 2), (2, 1), (2, 0)], ids=["votes", "outcome", "coordinator"]
)
def test_what_one_rank_cancels_is_done_by_none(jobs, disk_path, victim, culprit):
    root, job = disk_path / "store", jobs.of(4)
    job.call(save_step, root, 1)
    found = job.call(cancel_one, root, 2, victim, culprit, False)
    for number, outcome in enumerate(found):
        if number == victim:
            assert type(outcome.found) is SaveCancelledError
        else:
            assert type(outcome.found) is RankError, outcome
            assert outcome.found.rank == victim
    job.call(save_step, root, 3)
    assert penstock.CheckpointStore(root).steps() == [1, 3]
    assert_holds(root, 3, 3, 4)


def cancel_in_commit(root, step, victim):
    """Too late: the commit has begun."""
    store = store_of(root)
    ordinary = Save._commit

    def commit(*arguments):
        time.sleep(2 * SOON_SECONDS)
        return ordinary(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "_commit", commit)
        pending = store.save_async(step, state(step))
        if rank() == victim:
            time.sleep(SOON_SECONDS)
            pending.cancel()
        return outcome_of(pending.result)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_commit_that_has_begun_is_not_cancelled(jobs, disk_path, victim):
    root, job = disk_path / "store", jobs.of(4)
    found = job.call(cancel_in_commit, root, 1, victim)
    job.call(save_step, root, 2)
    assert penstock.CheckpointStore(root).steps() == [1, 2]
    for step in (1, 2):
        assert_holds(root, step, step, 4)
    for outcome in found:
        assert isinstance(outcome.found, SaveReport)


# Loads.


def load_what_fits_not_all(root, culprit):
    into = cleared(state(1))
    if rank() == culprit:
        into["own"] = torch.zeros(3, 3)
    began = time.monotonic()
    with warnings.catch_warnings():
        # Ignores the warning about the skipped step.
        warnings.simplefilter("ignore", PenstockWarning)
        store = store_of(root, options=PATIENT)
        error, ended = outcome_of(store.load, into=into, fallback=True)
        again = store.load(into=cleared(state(1)), fallback=True)
    assert local_bytes(again) == local_bytes(state(1))
    store.save(3, state(3))
    return error, ended - began


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("is_damaged", [False, True], ids=["newest", "one before"])
def test_a_fallback_that_fails_on_one_rank_is_told_to_all(jobs, disk_path, culprit, is_damaged):
    root, job = disk_path / "store", jobs.of(4)
    job.call(save_step, root, 1)
    if is_damaged:
        job.call(save_step, root, 2)
        (shard,) = (root / "step-0000000002").glob("shard-00001-*")
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    found = job.call(load_what_fits_not_all, root, culprit)
    for number, (error, seconds) in enumerate(found):
        if number == culprit:
            assert type(error) is StateMismatchError
        else:
            assert type(error) is RankError
            assert error.rank == culprit
        assert seconds < PATIENT.rank_timeout_seconds / 2
    assert_holds(root, 3, 3, 4)


# A number for all ranks.


class Numbering:
    """A run whose coordinator proposes a number."""

    def entered(self, save_round):
        self.round = save_round
        save_round.proposal = 7 if rank() == 0 else None

    def saved(self, *_):
        pass


def number_without_outcome(root):
    """Rank 1 misses the outcome, and finds the checkpoint."""
    run, saver = Numbering(), penstock.Saver(options=PATIENT)
    saver.record(run)
    wait_outcome = Round.wait_outcome

    def miss(one):
        wait_outcome(one)
        raise RankError("missed", rank=0)

    if rank() == 1:
        Round.wait_outcome = miss
    try:
        saver.save(root / "step", state(1))
    finally:
        Round.wait_outcome = wait_outcome
    return run.round.announcement


def test_a_rank_that_misses_the_outcome_has_the_number(disk_path):
    job = Job(2)
    try:
        job.start(number_without_outcome, disk_path)
        assert job.finish() == [7, 7]
    finally:
        job.close()


# The end of the store.


def save_and_lose_the_store(root):
    """Rank 0 dies after the commit, and the key-value store with it."""
    store = store_of(root, options=PATIENT)
    if rank() == 0:
        Round.post_outcome = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    assert store.save_async(1, state(1)).result().rank == rank()
    began = time.monotonic()
    error = outcome_of(store.save, 2, state(2)).found
    return error, time.monotonic() - began


def test_what_is_committed_stands_where_the_store_dies_before_all_know(disk_path):
    job = Job(4, is_hosted=False)
    try:
        job.start(save_and_lose_the_store, disk_path)
        for error, seconds in job.finish(ranks=[1, 2, 3]):
            # No rank answers any more.
            assert type(error) is RankError
            assert seconds < PATIENT.rank_timeout_seconds / 2
    finally:
        job.is_broken = True
        job.close()
    assert penstock.CheckpointStore(disk_path).steps() == [1]
    assert_holds(disk_path, 1, 1, 4)
