"""`penstock.integrations.megatron`: `dist_checkpointing` saved and loaded by Penstock."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import parse

megatron = pytest.importorskip("megatron.core.dist_checkpointing")

from megatron.core import __version__ as megatron_version  # noqa: E402
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor  # noqa: E402

import penstock  # noqa: E402
from conftest import tell  # noqa: E402
from megatrons import (  # noqa: E402
    OWN,
    assert_loaded,
    load,
    on_cpu,
    queue,
    save,
    state,
    strategy,
)
from penstock.errors import CorruptCheckpointError, MissingDependencyError  # noqa: E402
from penstock.integrations import versions  # noqa: E402
from penstock.integrations.megatron import (  # noqa: E402
    LoadStrategy,
    SaveStrategy,
    ShardedStateMismatchError,
    enable,
    fitting,
)
from penstock.integrations.megatron.pieces import pieces_of  # noqa: E402
from penstock.integrations.megatron.waiting import EndMark, wait_for_end  # noqa: E402
from ranks import Job  # noqa: E402

KILLS = int(os.environ.get("PENSTOCK_TORTURE_MEGATRON_KILLS", "3"))

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def save_model(path, tensor_parallel, is_parallel):
    with enable():
        save(state(tensor_parallel), path, strategy(is_parallel=is_parallel))


def load_model(path, tensor_parallel):
    with enable():
        # There is one object for each rank that saved.
        found = load(state(tensor_parallel, is_blank=True) | {"rng": []}, path)
        found["rng"] = state(tensor_parallel)["rng"]
        assert_loaded(found, tensor_parallel)


def round_trip(path, tensor_parallel, is_parallel):
    """As many ranks: the objects, too; equal to what Megatron-Core itself loads of its own."""
    save(state(tensor_parallel), f"{path}-own", strategy(is_parallel=is_parallel))
    assert_loaded(load(state(tensor_parallel, is_blank=True), f"{path}-own"), tensor_parallel)
    with enable():
        save(state(tensor_parallel), path, strategy(is_parallel=is_parallel))
        found = load(state(tensor_parallel, is_blank=True), path, strict="raise_all")
        assert_loaded(found, tensor_parallel)
        # A checkpoint of Megatron-Core's own loads as before.
        assert_loaded(load(state(tensor_parallel, is_blank=True), f"{path}-own"), tensor_parallel)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_state_comes_back_as_from_megatron_itself(jobs, disk_path, is_parallel):
    jobs.of(2).call(round_trip, disk_path / "iter_0000001", 2, is_parallel)
    path = disk_path / "iter_0000001"
    assert penstock.verify(path).ok
    config = json.loads((path / "metadata.json").read_bytes())
    assert config["sharded_backend"] == "torch_dist"
    assert (path / "common.pt").exists()
    stored = penstock.load(path)["tensors"]
    assert stored["layers.fc1"].shape == (4, 12, 8)
    assert not list(path.glob("*.distcp"))


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "ranks_later", "tensor_parallel_later"),
    [
        (2, 1, 2, 2),
        (2, 2, 1, 1),
        pytest.param(4, 2, 2, 2, marks=pytest.mark.slow),
        pytest.param(8, 4, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_it_loads_at_other_parallel_sizes(
    jobs, disk_path, ranks, tensor_parallel, ranks_later, tensor_parallel_later
):
    path = disk_path / "iter_0000001"
    jobs.of(ranks).call(save_model, path, tensor_parallel, True)
    jobs.of(ranks_later).call(load_model, path, tensor_parallel_later)


def rows(first, *, dtype=torch.float32, data=None, is_regular=True):
    """Three of the six rows of a tensor, from a row on; perhaps of another type than declared."""
    found = ShardedTensor(
        key="w",
        data=torch.full((3, 2), 2.0) if data is None else data,
        dtype=torch.float32,
        local_shape=(3, 2),
        global_shape=(6, 2),
        global_offset=(first, 0),
        axis_fragmentations=(2, 1) if is_regular else None,
    )
    # Megatron-Core compares the types when the description is made.
    found.data = found.data.to(dtype)
    return found


class Unpicklable:
    def __reduce__(self):
        raise TypeError("no pickle of this")


MISTAKES = {
    "a gap beside an overlap": lambda rank: {"w": rows(2 * rank, is_regular=False)},
    "another type on all ranks": lambda rank: {"w": rows(3 * rank, dtype=torch.bfloat16)},
    "another type on one rank": lambda rank: {
        "w": rows(3 * rank, dtype=torch.bfloat16 if rank else torch.float32)
    },
    "an object that one rank cannot pickle": lambda rank: {
        "w": rows(3 * rank),
        "o": ShardedObject("o", Unpicklable() if rank else 1, (2,), (rank,)),
    },
}


def save_mistaken(path, mistake):
    """A good save, then one with a mistake; returns its refusal, its time, and what is there."""
    rank = dist.get_rank()
    save({"step": 1, "w": rows(3 * rank, data=torch.ones(3, 2))}, path, SaveStrategy())
    began = time.monotonic()
    refusal = None
    try:
        save({"step": 2, **MISTAKES[mistake](rank)}, path, SaveStrategy())
    except Exception as error:
        refusal = type(error).__name__
    seconds = time.monotonic() - began
    loaded = None
    with contextlib.suppress(CorruptCheckpointError):
        loaded = load_rows(path)
    return refusal, seconds, loaded


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_save_that_could_not_be_loaded_is_refused_on_all_ranks(jobs, disk_path, mistake):
    skip_irregular(mistake)
    path = disk_path / "iter_0000001"
    for refusal, seconds, loaded in jobs.of(2).call(save_mistaken, path, mistake):
        if mistake == "another type on all ranks":
            # It is the type of the elements that counts, not the one that is declared.
            assert refusal is None
            assert loaded == (2, 2.0)
            continue
        assert refusal is not None
        assert seconds < 60
        # Either all of the first save, or an error: a Megatron-Core before 0.19 has replaced its
        # common state by then.
        assert loaded in {None, (1, 1.0)}
    assert penstock.verify(path).ok
    expected = 2.0 if mistake == "another type on all ranks" else 1.0
    assert (penstock.load(path)["tensors"]["w"] == expected).all()


def skip_irregular(mistake):
    if mistake == "a gap beside an overlap" and parse(megatron_version).release < (0, 16):
        pytest.skip(f"Megatron-Core {megatron_version} refuses such pieces itself, on rank 0 alone")


def test_a_common_state_of_a_failed_save_can_be_put_back(jobs, disk_path):
    skip_irregular("a gap beside an overlap")
    path = disk_path / "iter_0000001"
    jobs.of(2).call(save_mistaken, path, "a gap beside an overlap")
    (kept,) = path.glob("beside.*.common.pt")
    (path / "common.pt").write_bytes(kept.read_bytes())
    assert jobs.of(2).call(load_rows, path) == [(1, 1.0), (1, 1.0)]


def load_rows(path):
    wanted = {"step": 0, "w": rows(3 * dist.get_rank(), data=torch.zeros(3, 2))}
    loaded = load(wanted, path, LoadStrategy())
    return loaded["step"], loaded["w"][0, 0].item()


def save_in_background(path, is_persistent, is_nvrx=False):
    on_cpu()
    with enable():
        workers = path.parent / f"rank-{dist.get_rank()}"
        workers.mkdir()
        calls = nvrx_queue(is_persistent) if is_nvrx else queue(workers if is_persistent else None)
        how = {"async_strategy": "nvrx"} if is_nvrx else {}
        for step in (1, 2):
            before = state(2, step=step)
            calls.schedule_async_request(save(before, path, async_sharded_save=True, **how))
            for layer in before["model"]["layers"].values():
                layer["fc1"].data.fill_(-1)
            # The queue of nvidia-resiliency-ext gives every call the number 0.
            expected = [0 if is_nvrx else step - 1]
            assert calls.maybe_finalize_async_calls(blocking=True) == expected
            assert_loaded(load(state(2, is_blank=True), path), 2, step)
        calls.close()


@pytest.mark.parametrize("is_persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_request_waits_for_the_save_and_the_state_may_change(jobs, disk_path, is_persistent):
    # A persistent worker imports PyTorch.
    path, seconds = disk_path / "iter_0000001", 200 if is_persistent else 60
    jobs.of(2).call(save_in_background, path, is_persistent, timeout_seconds=seconds)


def nvrx_queue(is_persistent):
    core = importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    # The mode in which its worker needs no GPU.
    return core.AsyncCallsQueue(persistent=is_persistent, cpu_shm_mode=is_persistent)


@pytest.mark.parametrize("is_persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests_run_on_the_queue_of_nvidia_resiliency_ext(jobs, disk_path, is_persistent):
    pytest.importorskip("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    if parse(megatron_version).release < (0, 17):
        pytest.skip("Megatron-Core has requests of its own only, before 0.17")
    # Each worker imports PyTorch.
    path, seconds = disk_path / "iter_0000001", 200
    jobs.of(2).call(save_in_background, path, is_persistent, True, timeout_seconds=seconds)


TRACKER = "latest_checkpointed_iteration.txt"


def newest(root):
    """The iteration that the tracker names; 0 if there is none."""
    return int((root / TRACKER).read_text()) if (root / TRACKER).exists() else 0


def train(root, tensor_parallel):
    """Trains on from the newest iteration, and saves each further one in the background."""
    on_cpu()
    step, calls = newest(root), queue()
    with enable():
        if step:
            path = root / f"iter_{step:07}"
            found = load(state(tensor_parallel, is_blank=True), path, strict="raise_all")
            assert_loaded(found, tensor_parallel, step)
        while True:
            step += 1
            request = save(
                state(tensor_parallel, step=step),
                root / f"iter_{step:07}",
                strategy(is_parallel=True),
                async_sharded_save=True,
            )
            request.add_finalize_fn(lambda step=step: track(root, step))
            calls.schedule_async_request(request)
            calls.maybe_finalize_async_calls(blocking=True)


def track(root, step):
    """Writes the tracker, as a trainer's finalizer does."""
    if dist.get_rank() == 0:
        (root / "tracker.tmp").write_text(str(step))
        os.replace(root / "tracker.tmp", root / TRACKER)


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_at_another_geometry(disk_path):
    seed = int(os.environ.get("PENSTOCK_TORTURE_SEED", "4207"))
    tell(f"seed {seed}")
    draw = random.Random(seed)
    steps = []
    for turn in range(KILLS):
        job = Job(2)
        job.start(train, disk_path, 1 + turn % 2, timeout_seconds=120)
        deadline = time.monotonic() + 100
        while newest(disk_path) <= (steps[-1] if steps else 0) + 1:
            assert time.monotonic() < deadline, "no save has ended"
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        for rank in (0, 1):
            job.signal(rank, signal.SIGKILL)
        job.is_broken = True
        job.close()
        steps.append(newest(disk_path))
    assert steps == sorted(set(steps))


def lose_a_shard(path, is_async):
    with enable():
        save(state(2), path)
        before = state(2)
        if dist.get_rank() == 1:
            del before["model"]["layers"][3]["fc2"]
        try:
            request = save(
                before, path, validate_access_integrity=False, async_sharded_save=is_async
            )
            if is_async:
                request.async_fn(*request.async_fn_args)
                request.finalize_fns[0]()
        except penstock.PenstockError as error:
            assert_loaded(load(state(2, is_blank=True), path), 2)
            return str(error)
    return None


@pytest.mark.parametrize("is_async", [False, True])
def test_a_lost_shard_fails_the_save_by_name_on_all_ranks(jobs, disk_path, is_async):
    for said in jobs.of(2).call(lose_a_shard, disk_path / "iter_0000001", is_async):
        assert "layers.fc2 is not whole on all ranks" in said
        assert "nothing was committed" in said


def grow(path, is_enabled):
    """Saves twice as if the structure were constant, with a tensor more at the second time."""
    on_cpu()
    with enable() if is_enabled else contextlib.nullcontext():
        one = None if is_enabled else SaveStrategy()
        how = strategy(one, is_parallel=True, do_cache_distribution=True)
        save(state(1), path, how)
        later = state(1)
        later["late"] = ShardedTensor.from_rank_offsets(
            "late", torch.arange(6.0), replica_id=dist.get_rank()
        )
        save(later, path, how, validate_access_integrity=False)
        into = {"late": ShardedTensor.from_rank_offsets("late", torch.zeros(6))}
        found = load(into, path, LoadStrategy(), validate_access_integrity=False)
        assert torch.equal(found["late"], torch.arange(6.0))


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_tensor_that_has_come_is_saved_although_the_structure_is_assumed_constant(
    jobs, disk_path, is_enabled
):
    jobs.of(2).call(grow, disk_path / "iter_0000001", is_enabled)


def differ(path):
    """Loads with other names, shapes and strictness; returns what the errors say."""
    on_cpu()
    said = []
    with enable():
        save(state(1), path)
        into = state(1, is_blank=True)
        into["more"] = ShardedTensor.from_rank_offsets(
            "more", torch.zeros(3), replica_id=dist.get_rank()
        )
        del into["model"]["embedding"]
        _, missing, unexpected = load(into, path, strict="return_all")
        assert (missing, unexpected) == ({"embedding"}, {"more"})
        with pytest.raises(megatron.core.CheckpointingException, match="embedding"):
            load(into, path, strict="raise_all")
        found = load(state(1, is_blank=True) | {"more": into["more"]}, path, strict="log_all")
        assert "more" not in found
        for wrong in (
            into["more"],
            ShardedTensor.from_rank_offsets("embedding", torch.zeros(17, 4)),
            ShardedObject("nothing", None, (1,), (0,)),
        ):
            with pytest.raises(ShardedStateMismatchError) as caught:
                load({"wrong": wrong}, path, validate_access_integrity=False)
            said.append(str(caught.value))
            assert caught.value.key == getattr(wrong, "unique_key", wrong.key)
        padded = ShardedTensor.from_rank_offsets(
            "embedding", torch.ones(20, 4, dtype=torch.bfloat16), allow_shape_mismatch=True
        )
        found = load({"padded": padded}, path, validate_access_integrity=False)["padded"]
        whole = state(1)["model"]["embedding"].data
        assert torch.equal(found[:16], whole)
        assert not found[16:].any()
        # Of another type, and without memory given.
        wide = ShardedTensor.from_rank_offsets("embedding", torch.zeros(16, 4))
        wide.data = None
        found = load({"wide": wide}, path, validate_access_integrity=False)["wide"]
        assert torch.equal(found, whole.float())
    return said


def test_other_names_and_shapes_are_errors_by_name_or_as_strictness_says(jobs, disk_path):
    for said in jobs.of(2).call(differ, disk_path / "iter_0000001"):
        assert "no tensor 'more'" in said[0]
        assert "embedding has the global shape (16, 4), and the model wants (17, 4)" in said[1]
        assert "no object 'nothing/shard_0_1'" in said[2]


def read_damaged(path):
    with enable(), pytest.raises(CorruptCheckpointError) as caught:
        load(state(1, is_blank=True), path)
    return str(caught.value)


def test_damage_is_found_and_named(jobs, disk_path):
    path = disk_path / "iter_0000001"
    jobs.of(1).call(save_model, path, 1, False)
    shard = next(path.glob("shard-*"))
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xee")
    (said,) = jobs.of(1).call(read_damaged, path)
    assert shard.name in said


def take_turns(path):
    """Megatron-Core and Penstock save over each other's checkpoint."""
    save(state(2), path)
    with enable():
        save(state(2), path)
        assert_loaded(load(state(2, is_blank=True), path), 2)
        if dist.get_rank() == 0:
            assert not [name for name in os.listdir(path) if name.endswith(".distcp")]
    save(state(1), path)
    assert_loaded(load(state(1, is_blank=True), path), 1)
    with enable():
        # The newest is Megatron-Core's.
        assert_loaded(load(state(1, is_blank=True), path), 1)


def test_each_may_save_over_the_other(jobs, disk_path):
    jobs.of(2).call(take_turns, disk_path / "iter_0000001")


def pass_strategies(path):
    """Without `enable`."""
    on_cpu()
    save(state(2), path, SaveStrategy())
    assert penstock.verify(path).ok
    assert_loaded(load(state(2, is_blank=True), path, LoadStrategy()), 2)
    common = megatron.load_common_state_dict(str(path))
    assert common["args"] == {"lr": 0.5}
    plain = LoadStrategy().load_sharded_metadata(path)
    assert plain["embedding"].global_shape == (16, 4)
    assert "rng/shard_0_2" in plain
    # From 0.19 on it is an object, which strict loads of earlier versions do not ask for.
    assert not [key for key in plain if key.startswith("common_state")]


def test_loops_can_pass_the_strategies(jobs, disk_path):
    jobs.of(2).call(pass_strategies, disk_path / "iter_0000001")


def pass_names(path):
    save(state(1), path, ("penstock", 1))
    assert penstock.verify(path).ok
    assert_loaded(load(state(1, is_blank=True), path, ("penstock", 1)), 1)


def register_names(path):
    with enable():
        pass_names(path)


def test_the_strategies_are_registered_where_there_is_a_registry(jobs, disk_path):
    if not hasattr(megatron.serialization, "get_default_strategy"):
        pytest.skip("Megatron-Core looks strategies up by name before 0.17 only")
    jobs.of(1).call(register_names, disk_path / "iter_0000001")


def test_enable_takes_back_what_it_has_replaced():
    before = dict(vars(OWN))
    with enable():
        assert OWN.save is not before.get("save")
        with enable():
            pass
        assert dict(vars(OWN)) == before
    assert dict(vars(OWN)) == before


PROGRAM = """
import os, sys, torch, torch.distributed as dist
import beside
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

if __name__ == "__main__":
    assert sys.argv[1:] == ["--save", sys.argv[2]], sys.argv
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(5.0))}
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    dist_checkpointing.save(state, sys.argv[2], strategy)
"""


@pytest.mark.slow
def test_a_program_that_is_not_edited_saves_through_penstock(tmp_path):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "beside.py").touch()
    (tmp_path / "program" / "train.py").write_text(PROGRAM)
    (tmp_path / "ckpt").mkdir()
    command = [sys.executable, "-m", "penstock.megatron"]
    subprocess.run(
        [*command, "program/train.py", "--save", tmp_path / "ckpt"], cwd=tmp_path, check=True
    )
    assert torch.equal(penstock.load(tmp_path / "ckpt")["tensors"]["w"], torch.arange(5.0))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "usage: python -m penstock.megatron [--datasets] PROGRAM.py" in done.stderr


def try_newer(path):
    versions._tried["megatron-core"] = ("0.1", "0.2")
    try:
        with enable():
            save(state(1), path)
            assert_loaded(load(state(1, is_blank=True), path), 1)
    finally:
        versions._tried["megatron-core"] = ("0.13", "0.19")
        versions._self_checked.discard("megatron-core")
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_a_newer_version_is_tried_out_first(jobs, disk_path):
    jobs.of(2).call(try_newer, disk_path / "run" / "iter_0000001")


def test_what_is_missing_in_another_version_is_named(monkeypatch):
    monkeypatch.delattr(megatron.serialization, "save_config")
    with pytest.raises(MissingDependencyError, match=r"no .*serialization\.save_config"):
        fitting.check()


@given(
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_flattened_range_is_taken_apart_into_boxes(shape, ends):
    items = int(np.prod(shape))
    first, end = sorted(round(one * items) for one in ends)
    flat = torch.arange(float(items))[first:end]
    sharded = SimpleNamespace(
        data=flat,
        prepend_axis_num=1,
        global_offset=(5, *(2 * size for size in shape)),
        local_shape=shape,
        flattened_range=slice(first, end),
    )
    filled = torch.full((6, *(3 * size for size in shape)), -1.0)
    for start, elements in pieces_of(sharded):
        assert not elements.numel() or elements.untyped_storage().data_ptr() == (
            flat.untyped_storage().data_ptr()
        )
        box = tuple(slice(at, at + size) for at, size in zip(start, elements.shape, strict=True))
        assert (filled[box] == -1).all()
        filled[box] = elements
    local = filled[(5, *(slice(2 * size, None) for size in shape))]
    assert torch.equal(local.flatten()[first:end], flat)
    assert (filled != -1).sum() == end - first


HOLDER = """
import sys, time
from penstock.integrations.megatron.waiting import EndMark
mark = EndMark()
print(mark.path, flush=True)
time.sleep(100)
"""


def test_a_wait_ends_with_the_save_or_with_its_process():
    fork = multiprocessing.get_context("fork")
    mark = EndMark()
    waiter = fork.Process(target=wait_for_end, args=(mark.path,))
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive()
    mark.release()
    waiter.join(60)
    assert waiter.exitcode == 0
    wait_for_end(mark.path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True
    ) as holder:
        path = holder.stdout.readline().strip()
        waiter = fork.Process(target=wait_for_end, args=(path,))
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()
        holder.send_signal(signal.SIGKILL)
        waiter.join(60)
        assert waiter.exitcode == 0
    os.unlink(path)
