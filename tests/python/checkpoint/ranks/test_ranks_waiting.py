"""Warnings of a rank that waits for others, and the number of ranks on a machine."""

from __future__ import annotations

import contextlib
import io
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import penstock
from dtensors import Layout, rank, sharded
from penstock.checkpoint.ranks import exchange, mailbox, node_ranks
from penstock.checkpoint.ranks.exchange import Exchange
from penstock.checkpoint.saving.save import Save
from penstock.common.process import placement
from penstock.errors import RankError

WRITE_SECONDS = 1
"""Duration of the slow rank's write, longer than the others' time until a reminder."""

PATIENT = penstock.Options(rank_timeout_seconds=60)

LONG_SECONDS = 1000
"""Longer than any rank waits."""


class Clock:
    """Time as ranks see it: it stands still until an event, then runs fast."""

    def __init__(self, has_happened):
        self._has_happened = has_happened
        self._now = 0

    def monotonic(self):
        self._now += LONG_SECONDS * self._has_happened()
        return self._now

    def sleep(self, seconds):
        time.sleep(seconds)


@contextlib.contextmanager
def reminding(has_happened):
    """Makes the reminder due after an event, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "time", Clock(has_happened))
        yield


@contextlib.contextmanager
def awaited(told, comes):
    """Makes the reminder due once the ranks in `comes` have arrived.

    Args:
        told: A directory for the ranks' messages: `reminded` exists once a rank was reminded.
        comes: The ranks that arrive.
    """
    told.mkdir(exist_ok=True)
    put, count = Exchange._put_own, Exchange._count

    def put_own(self, kind, text):
        put(self, kind, text)
        if kind == "come":
            (told / str(self.rank)).touch()

    def count_and_tell(self, name):
        found = count(self, name)
        if name == "reminded":
            (told / "reminded").touch()
        return found

    def have_come():
        return all((told / str(one)).exists() for one in comes)

    with pytest.MonkeyPatch.context() as patch, reminding(have_come):
        patch.setattr(Exchange, "_put_own", put_own)
        patch.setattr(Exchange, "_count", count_and_tell)
        yield


@contextlib.contextmanager
def given_up(told):
    """Makes waiting ranks give up once a rank has said so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailbox, "time", Clock((told / "reminded").exists))
        yield


def states():
    return {
        "numbers": {"step": 1, "array": np.ones(3)},
        "plain": {"w": torch.ones(3)},
        "rows": {"w": sharded("w", Layout([0, 1, 2, 3], [Shard(0)], (8, 3)))},
    }


def save(root, which, group):
    penstock.save(root / which, states()[which], options=PATIENT, process_group=group)


def save_async(root, which, group):
    store = penstock.CheckpointStore(root / which, options=PATIENT, process_group=group)
    store.save_async(1, states()[which]).result()


def load(root, which, group):
    penstock.CheckpointStore(root / which, options=PATIENT, process_group=group).load()


CALLS = {one.__name__: one for one in (save, save_async, load)}


def warned(name, root, which, comes):
    """Returns the warnings of this rank while it waits, and the error at the end."""
    # A group of its own, so that absent ranks are in step with the others afterwards.
    group = dist.new_group()
    if rank() not in comes:
        return [], None
    error, told = None, root / "told"
    with awaited(told, comes), given_up(told), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            CALLS[name](root, which, group)
        except penstock.PenstockError as caught:
            error = caught.with_traceback(None)
    return [(one.filename, str(one.message)) for one in found], error


WAITS = [
    ("save", "numbers", [0], "ranks 1, 2, 3"),
    ("save", "plain", [0], "ranks 1, 2, 3"),
    ("save", "rows", [0], "ranks 1, 2, 3"),
    ("save", "plain", [2], "ranks 0, 1, 3"),
    ("save", "rows", [1, 2, 3], "rank 0 "),
    ("save", "rows", [0, 1, 3], "rank 2 "),
    ("save_async", "numbers", [0], "ranks 1, 2, 3"),
    ("load", "plain", [0, 1, 2], "rank 3 "),
]


@pytest.mark.parametrize(("name", "which", "comes", "missing"), WAITS)
def test_who_waits_for_ranks_that_do_not_come_says_so_once(
    jobs, disk_path, name, which, comes, missing
):
    found = jobs.of(4).call(warned, name, disk_path, which, comes)
    said = [one for messages, _ in found for one in messages]
    assert len(said) == 1
    ((_, message),) = said
    assert f"waits for {missing}" in message
    assert "if rank == 0:" in message
    assert "no_dist=True" in message
    for number, (_, error) in enumerate(found):
        assert (type(error) is RankError) == (number in comes)


def test_the_warning_points_to_the_call(jobs, disk_path):
    said, _ = jobs.of(4).call(warned, "save", disk_path, "plain", [0])[0]
    assert [filename for filename, _ in said] == [__file__]


def warned_beside_slow_ranks(root):
    """All ranks arrive, one of them late."""
    store, writes, ordinary = penstock.CheckpointStore(root), root.parent / "writes", Save._write

    def write(self, attempt, number):
        if rank() == 2:
            writes.touch()
            time.sleep(WRITE_SECONDS)
        return ordinary(self, attempt, number)

    with (
        pytest.MonkeyPatch.context() as patch,
        reminding(writes.exists),
        warnings.catch_warnings(record=True) as found,
    ):
        patch.setattr(Save, "_write", write)
        warnings.simplefilter("always")
        store.save(1, states()["plain"])
    return [str(one.message) for one in found]


def test_nobody_is_warned_of_ranks_that_only_write_for_long(jobs, disk_path):
    assert jobs.of(4).call(warned_beside_slow_ranks, disk_path / "store") == [[]] * 4


def save_late_where_warnings_are_errors(path):
    told, said = path.parent / "told", io.StringIO()
    with contextlib.ExitStack() as stack:
        if rank() == 1:
            while not (told / "reminded").exists():
                time.sleep(0.01)
        else:
            stack.enter_context(awaited(told, [0, 2, 3]))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(contextlib.redirect_stderr(said))
        warnings.simplefilter("error")
        penstock.save(path, states()["numbers"])
    return said.getvalue()


def test_a_warning_that_is_an_error_ends_no_save(jobs, disk_path):
    told = jobs.of(4).call(save_late_where_warnings_are_errors, disk_path / "one")
    assert "waits for rank 1 to come" in "".join(told)
    assert penstock.verify(disk_path / "one").ok


# Ctrl-C while others write.


def save_while_one_fails(root, culprit):
    """Stops a rank's unneeded write when another rank has failed."""
    store = penstock.CheckpointStore(root)
    ordinary, stopped = Save._write, []

    def write(self, attempt, number):
        if rank() == culprit:
            raise KeyboardInterrupt
        real = self.job

        class Slow:
            def write(self, *arguments):
                while not stopped:
                    time.sleep(0.01)
                raise KeyboardInterrupt

            def cancel(self):
                stopped.append(True)
                real.cancel()

        self.job = Slow()
        return ordinary(self, attempt, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "_write", write)
        try:
            store.save(1, states()["numbers"])
        except (penstock.PenstockError, KeyboardInterrupt) as error:
            return (error.with_traceback(None),)
    return (None,)


@pytest.mark.parametrize("culprit", [0, 2])
def test_ranks_that_write_hear_of_a_failure_before_they_have_written(jobs, disk_path, culprit):
    found = jobs.of(4).call(save_while_one_fails, disk_path / "store", culprit)
    for number, (error,) in enumerate(found):
        if number == culprit:
            assert type(error) is KeyboardInterrupt
        else:
            assert type(error) is RankError
            assert error.rank == culprit
    assert penstock.CheckpointStore(disk_path / "store").steps() == []


# The number of ranks on a machine.

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}

PLACED = [
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, 4),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, None),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, None),
    (TORCHRUN, None),
    ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
    ({**MPICH, "MPI_LOCALNRANKS": "4"}, 4),
    ({**MPICH, "PMI_LOCAL_SIZE": "4"}, 4),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)", "SLURM_NODEID": "0"}, 4),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)", "SLURM_NODEID": "2"}, 2),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)", "SLURM_NODEID": "3"}, None),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,2(x2)"}, None),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2", "SLURM_NODEID": "0"}, None),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": ""}, None),
    # A script that passes its launcher's variables to PyTorch, except for one number.
    ({**TORCHRUN, **SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
    ({**TORCHRUN, **MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
    # One process on each machine, which started others.
    ({**TORCHRUN, **SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, None),
]


@pytest.mark.parametrize(("environment", "expected"), PLACED)
def test_launchers_say_how_many_ranks_this_machine_has(environment, expected):
    found = placement(environment)
    assert (found.rank, found.ranks, found.ranks_here) == (3, 8, expected)


def count_here(path, machine, variables):
    """Returns the number of ranks on its machine as this rank sees it in a save."""
    made = []
    ordinary = penstock._native.Arena

    class Arena:
        def __new__(cls, staging_bytes, sharers):
            made.append(sharers)
            return ordinary(staging_bytes, sharers)

    depths = []
    init = penstock._native.Job

    def job(*arguments, options, **settings):
        depths.append(options["queue_depth"])
        return init(*arguments, options=options, **settings)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        if machine is not None:
            patch.setattr(node_ranks, "_machine", lambda: f"machine {machine[rank()]}")
        patch.setattr(penstock._native, "Arena", Arena)
        patch.setattr(penstock._native, "Job", job)
        group = dist.new_group()
        store = penstock.CheckpointStore(path, process_group=group)
        store.save_async(1, states()["rows"]).result()
        store.save_async(2, states()["rows"]).result()
        store.close()
    return made, depths


def at(count):
    return [count], [16 // count if count > 1 else None] * 2


HERE = [
    # No launcher, as with torch.multiprocessing.spawn.
    (None, {}, [4, 4, 4, 4]),
    ([0, 1, 0, 0], {}, [3, 1, 3, 3]),
    (None, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", **MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"}, [2] * 4),
    # Variables of another job, such as the parent's.
    (None, {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, [4] * 4),
]


@pytest.mark.parametrize(("machine", "variables", "expected"), HERE)
def test_ranks_share_memory_and_queue_with_those_of_their_machine(
    jobs, disk_path, machine, variables, expected
):
    found = jobs.of(4).call(count_here, disk_path / "store", machine, variables)
    assert found == [at(count) for count in expected]
