"""`penstock.integrations.megatron`: an error of one rank is an error of all."""

from __future__ import annotations

import os
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist

megatron = pytest.importorskip("megatron.core.dist_checkpointing")

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelLoadStrategyWrapper,
)

import penstock  # noqa: E402
from megatrons import load, on_cpu, save, state, strategy  # noqa: E402
from penstock.errors import PenstockError, StorageError  # noqa: E402
from penstock.integrations.dcp import directory  # noqa: E402
from penstock.integrations.megatron import (  # noqa: E402
    LoadStrategy,
    SaveStrategy,
    agreement,
    enable,
    waiting,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class UnreadableOnOne:
    """An object that rank 1 cannot unpickle."""

    def __reduce__(self):
        return _unpickle, ()


def _unpickle():
    if dist.get_rank() == 1:
        raise ValueError("not on this machine")
    return "fine"


def objects(value):
    rank, size = dist.get_rank(), dist.get_world_size()
    return {"o": ShardedObject("o", value, (size,), (rank,))}


def refusal(call, *arguments, **named):
    """Returns the error that a rank raises, as its class and its words."""
    try:
        call(*arguments, **named)
    except Exception as error:
        return type(error).__name__, str(error)
    return None, "it raised nothing"


def load_with_one_failing(path, how):
    """Returns the refusals; a load by all ranks afterwards succeeds."""
    on_cpu()
    rank = dist.get_rank()
    one = LoadStrategy()
    with enable():
        save(state(2) | objects(UnreadableOnOne()), path)
        if how == "the directory is not there":
            where = path if rank == 0 else os.path.join("/nowhere", path.name)
            found = refusal(load, state(2, is_blank=True), where, strict="raise_all")
        else:
            if how == "parallel":
                one = FullyParallelLoadStrategyWrapper(one)
            found = refusal(load, state(2, is_blank=True) | objects(None), path, one)
        load(state(2, is_blank=True), path)
    return found


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("the directory is not there", "does not exist"),
        ("an object cannot be read", "not on this machine"),
        ("parallel", "not on this machine"),
    ],
)
def test_a_load_that_fails_on_one_rank_fails_on_all(jobs, disk_path, how, said):
    found = jobs.of(2).call(load_with_one_failing, disk_path / "iter_0000001", how)
    assert said in found[1][1]
    assert found[0][0] == "RankError"
    assert "rank 1 failed" in found[0][1]
    assert said in found[0][1]


@pytest.mark.slow
def test_a_load_that_fails_on_one_of_eight_ranks_fails_on_all(jobs, disk_path):
    path = disk_path / "iter_0000001"
    found = jobs.of(8).call(load_with_one_failing, path, "parallel", timeout_seconds=120)
    assert all("not on this machine" in said for _, said in found)


def doubled(is_regular=True):
    """A tensor that both ranks store, each as a whole."""
    return ShardedTensor(
        key="w",
        data=torch.ones(4),
        dtype=torch.float32,
        local_shape=(4,),
        global_shape=(4,),
        global_offset=(0,),
        axis_fragmentations=(1,) if is_regular else None,
    )


def ownerless(is_regular):
    found = doubled(is_regular)
    found.replica_id = 1 + dist.get_rank()
    return found


def save_refused(path, make, is_regular, is_validated, is_parallel):
    on_cpu()
    with enable():
        save({"v": rows(1.0)}, path)
        found = refusal(
            save,
            {"v": rows(2.0), "w": make(is_regular)},
            path,
            strategy(is_parallel=is_parallel, do_cache_distribution=True) if is_parallel else None,
            validate_access_integrity=is_validated,
        )
        assert load({"v": rows(0.0)}, path)["v"].sum() == 2
    return found


def rows(value):
    rank, size = dist.get_rank(), dist.get_world_size()
    return ShardedTensor.from_rank_offsets("v", torch.full((2,), value), (0, rank, size))


@pytest.mark.parametrize("is_parallel", [False, True])
def test_megatrons_own_refusal_reaches_all_ranks(jobs, disk_path, is_parallel):
    path = disk_path / "iter_0000001"
    found = jobs.of(2).call(save_refused, path, doubled, True, True, is_parallel)
    assert found[0][0] == "CheckpointingException"
    assert found[1][0] == "RankError"
    assert all("Invalid access pattern" in said and "'w'" in said for _, said in found)


@pytest.mark.parametrize("is_regular", [True, False])
@pytest.mark.parametrize("is_validated", [True, False])
def test_a_tensor_that_no_rank_stores_is_refused_by_name(jobs, disk_path, is_regular, is_validated):
    path = disk_path / "iter_0000001"
    for _, said in jobs.of(2).call(save_refused, path, ownerless, is_regular, is_validated, False):
        is_megatrons = is_regular and is_validated
        assert "'w'" in said if is_megatrons else "w: no rank stores it" in said
    assert (penstock.load(path)["tensors"]["v"] == 1).all()


def save_often(path):
    """Returns how often the check ran in each save."""
    on_cpu()
    counts = []
    check = agreement.check_stored

    def counted(descriptions):
        counts[-1] += 1
        check(descriptions)

    agreement.check_stored = counted
    try:
        with enable():
            # The third has a tensor more on one rank, and the fourth is like it.
            for more in (0, 0, dist.get_rank(), dist.get_rank()):
                counts.append(0)
                saved = {"v": rows(1.0)}
                if more:
                    saved["w"] = doubled()
                save(saved, path, validate_access_integrity=len(counts) == 1)
    finally:
        agreement.check_stored = check
    return counts


def test_a_structure_that_is_said_to_be_constant_is_checked_when_it_changes(jobs, disk_path):
    found = jobs.of(2).call(save_often, disk_path / "iter_0000001")
    assert found == [[1, 0, 1, 0], [0, 0, 0, 0]]


def save_without_an_object(path):
    with enable():
        saved = {"v": rows(1.0)} | (objects(1) if dist.get_rank() == 0 else {})
        return refusal(save, saved, path, validate_access_integrity=False)


def test_a_missing_object_is_refused_by_name(jobs, disk_path):
    for _, said in jobs.of(2).call(save_without_an_object, disk_path / "iter_0000001"):
        assert "o: 1 of 2 objects of this key are there" in said


def save_and_wait(saved, path):
    request = save(saved, path, async_sharded_save=True)
    request.async_fn(*request.async_fn_args)
    request.finalize_fns[0]()


def save_without_temporary_files(path, failing):
    """Saves asynchronously where a rank has no directory of temporary files."""
    with enable():
        save({"v": rows(1.0)}, path)
        there = tempfile.gettempdir()
        if dist.get_rank() == failing:
            tempfile.tempdir = "/nowhere"
        try:
            found = refusal(save_and_wait, {"v": rows(2.0)}, path)
        finally:
            tempfile.tempdir = there
        assert load({"v": rows(0.0)}, path)["v"].sum() == 2
    return found


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_without_temporary_files_fails_the_save_of_all(jobs, disk_path, failing):
    path = disk_path / "iter_0000001"
    found = jobs.of(2).call(save_without_temporary_files, path, failing)
    for rank, (kind, said) in enumerate(found):
        assert kind == ("StorageError" if rank == failing else "RankError")
        assert "/nowhere" in said
        assert "set TMPDIR" in said


def save_without_a_thread(path, failing):
    """Saves asynchronously where a rank cannot start the thread that waits for the end."""
    start = threading.Thread.start

    def starting(thread):
        if thread.name == "penstock-megatron" and dist.get_rank() == failing:
            raise RuntimeError("can't start new thread")
        start(thread)

    with enable():
        save({"v": rows(1.0)}, path)
        threading.Thread.start = starting
        try:
            found = refusal(save_and_wait, {"v": rows(2.0)}, path)
        finally:
            threading.Thread.start = start
        assert load({"v": rows(0.0)}, path)["v"].sum() == 2
    return *found, dist.get_rank() == failing and bool(waiting._marks)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_without_threads_fails_the_save_of_all(jobs, disk_path, failing):
    path = disk_path / "iter_0000001"
    found = jobs.of(2).call(save_without_a_thread, path, failing)
    for rank, (kind, said, is_left) in enumerate(found):
        assert kind == ("StorageError" if rank == failing else "RankError")
        assert "can't start new thread" in said
        assert "raise the limit of threads" in said
        assert not is_left


def fail_to_mark(path):
    mark = directory.mark

    def failing(path):
        raise StorageError(f"{path}: no space left", path=path, errno=28)

    directory.mark = failing
    try:
        found = refusal(save, {"v": rows(1.0)}, path, SaveStrategy())
    finally:
        directory.mark = mark
    assert load({"v": rows(0.0)}, path, LoadStrategy())["v"].sum() == 2
    return found


def test_an_error_after_the_commit_reaches_all_ranks(jobs, disk_path):
    for kind, said in jobs.of(2).call(fail_to_mark, disk_path / "iter_0000001"):
        assert issubclass(getattr(penstock.errors, kind), PenstockError)
        assert "no space left" in said
