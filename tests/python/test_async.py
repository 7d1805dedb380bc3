"""Saves in the background: what is saved is what was there, and a failure never goes unheard.

Where a test needs a save that stays under way it locks the step's directory, as a sweep at work
in it does: the save waits for the lock, for as long as the test wants. Nothing here depends on how
fast anything is.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import gc
import json
import os
import shutil
import signal
import tempfile
import textwrap
import threading
import time
import traceback
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import forks
import penstock
import victim
from compare import assert_same
from conftest import MATRIX, mounted, run_child, tell, uring_refusal
from opened import assert_settles_at, settled
from test_kill import Victim
from ticker import Ticker

MIB = 1 << 20

STEPS = int(os.environ.get("PENSTOCK_TORTURE_STEPS", "200"))
"""Optimizer steps that race with lazy saves, for each optimizer; the variable takes more."""

SLOWLY = penstock.Options(queue_depth=1, io_threads=1, extent_bytes=MIB)
"""One request at a time: what is under way is seen under way."""

torch.set_num_threads(1)


@pytest.fixture
def memory_path(tmp_path):
    """A directory in memory, where there is one: for many saves whose disk is not the point."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="penstock-test-") as directory:
        yield Path(directory)


@contextmanager
def held(store, step):
    """Keeps saves of a step from beginning, until the block ends or what it gives is called."""
    directory = Path(store.path(step))
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY)

    def release():
        fcntl.flock(fd, fcntl.LOCK_UN)

    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield release
    finally:
        release()
        os.close(fd)


def in_the_way(store, step):
    """Makes the save of a step fail, whoever saves: a file is where its directory should be."""
    path = Path(store.path(step))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"in the way")
    return path


def tree(root):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))


# Eager: the state is free when the call returns.


def make_state(big_bytes=3 * MIB):
    """Every kind of memory, twice the same."""
    generator = torch.Generator().manual_seed(1)
    big = torch.randint(0, 255, (big_bytes,), dtype=torch.uint8, generator=generator)
    square = torch.randn(300, 301, generator=generator)
    array = np.arange(120_000, dtype=np.float64).reshape(300, 400)
    return {
        "contiguous": big,
        "view": big[1000:200_000],
        "strided": square.t(),
        "stepped": square.t()[1::2, ::3].clone()[:, ::2],
        "tied": square,
        "parameter": torch.nn.Parameter(torch.randn(257, 129, generator=generator)),
        "conjugated": torch.randn(99, dtype=torch.complex64, generator=generator).conj(),
        "bfloat16": torch.randn(40_001, generator=generator).bfloat16(),
        "flags": torch.arange(70_001) % 3 == 0,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5),
        "array": array,
        "fortran": np.asfortranarray(array[:, :77]).copy(order="F"),
        "backward": np.arange(50_000)[::-1],
        "zero_dim": np.array(7, np.int16),
        "bytes": b"ab" * 5000,
        "bytearray": bytearray(range(256)) * 1000,
        "short": bytearray(b"abc"),
        "plain": [1, 2.5, None, "text", {"nested": (1, [2, 3])}],
        "ordered": OrderedDict(a=np.float32(1.5), b=[torch.ones(3)]),
    }


def spoil(value):
    """Changes everything that can be changed in place, down to the containers."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(torch.zeros_like(value)).add_(value == 0)
    elif isinstance(value, np.ndarray):
        value[...] = 1
    elif isinstance(value, bytearray):
        value[:] = b"\xee" * len(value)
        # Nothing of ours holds on to the memory.
        value.extend(b"more")
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value.clear()
    elif isinstance(value, list):
        for item in value:
            spoil(item)
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)


@pytest.mark.parametrize("staging_bytes", [None, 4 * MIB], ids=["roomy", "pipeline"])
def test_a_state_may_be_changed_as_soon_as_the_call_returns(disk_path, options, staging_bytes):
    chosen = penstock.Options(
        engine=options.engine, direct=options.direct, staging_bytes=staging_bytes
    )
    with penstock.CheckpointStore(disk_path / "store", options=chosen) as store:
        for step in range(2):
            state = make_state(16 * MIB)
            pending = store.save_async(step, state)
            spoil(state)
            report = pending.result()
            if staging_bytes is not None:
                assert report.staging_peak_bytes <= staging_bytes
        for step in range(2):
            assert_same(store.load(step), make_state(16 * MIB))


def test_nothing_of_the_state_is_held_when_the_call_returns(disk_path):
    """Not even until the garbage collector comes by: it may be switched off."""
    store = penstock.CheckpointStore(disk_path / "store")
    gc.collect()
    gc.disable()
    try:
        with held(store, 1):
            state = {"t": torch.ones(MIB), "a": np.ones(MIB), "v": torch.ones(9, 9).t()}
            leaves = [weakref.ref(leaf) for leaf in state.values()]
            pending = store.save_async(1, state)
            del state
            assert [leaf() for leaf in leaves] == [None] * 3
        pending.result()
    finally:
        gc.enable()


@pytest.mark.parametrize("state", [{}, [], None, 7, torch.empty(0), {"a": np.empty((0, 3))}])
def test_a_state_of_almost_nothing_is_saved(disk_path, state):
    store = penstock.CheckpointStore(disk_path / "store")
    for step, lazy in enumerate([False, True]):
        pending = store.save_async(step, state, lazy=lazy)
        assert pending.wait_staged()
        pending.stage()
        pending.result()
        assert_same(store.load(step), state)
        done, total = pending.progress()
        assert done == total


BOUNDED = """
    import json, os, sys
    import numpy as np
    import torch
    import penstock

    def status(name):
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024

    path, direct, kind, lazy, staging_bytes = sys.argv[1:]
    options = penstock.Options(direct=direct, staging_bytes=int(staging_bytes))
    store = penstock.CheckpointStore(path, options=options)
    of = {"array": np.asarray, "tensor": torch.from_numpy}[kind]
    state = [of(np.full(16 << 20, i, np.uint8)) for i in range(16)]
    store.save_async(0, [np.ones(1 << 20)]).result()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    peaks = []
    for step in range(1, 3):
        pending = store.save_async(step, state, lazy=bool(int(lazy)))
        pending.stage()
        for one in state:
            one += 1
        peaks.append(pending.result().staging_peak_bytes)
        store.delete(step - 1)
    growth = status("VmHWM") - before
    right = all(bool((one == i + 2).all()) for i, one in enumerate(state)) and all(
        bool((one == i + 1).all()) for i, one in enumerate(store.load(2))
    )
    print(json.dumps([growth, peaks, right]))
"""


@pytest.mark.parametrize(
    ("direct", "kind", "lazy"), [("on", "array", 0), ("off", "array", 1), ("off", "tensor", 1)]
)
def test_memory_stays_within_the_bound_that_was_given(disk_path, direct, kind, lazy):
    staging_bytes = 24 * MIB
    growth, peaks, is_right = run_child(BOUNDED, disk_path / "s", direct, kind, lazy, staging_bytes)
    tell(growth, peaks)
    assert max(peaks) <= staging_bytes
    # Threads, rings, the plan; the state has 256 MiB.
    assert growth <= staging_bytes + 24 * MIB
    assert is_right


def test_closing_gives_the_memory_back_whoever_keeps_the_pending_save(disk_path):
    given_back, state_bytes = run_child(
        """
        import json, os, sys
        import numpy as np, penstock
        def rss():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
        store = penstock.CheckpointStore(sys.argv[1])
        state = np.ones(96 << 20, np.uint8)
        pending = store.save_async(1, state)
        pending.result()
        before = rss()
        store.close()
        print(json.dumps([before - rss(), state.nbytes]))
        # It stays usable.
        store.save_async(2, state).result()
        """,
        disk_path / "store",
    )
    assert given_back >= 0.9 * state_bytes


# Lazy: the state is copied while training goes on.


def lazy_state():
    return {"w": torch.arange(2 * MIB, dtype=torch.float32), "b": torch.arange(10.0)}


def test_a_lazy_save_returns_before_it_copies_and_stage_copies(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1):
        state = lazy_state()
        pending = store.save_async(1, state, lazy=True)
        assert not pending.wait_staged(0)
        assert not pending.done()
        pending.stage()
        assert pending.wait_staged(0)
        assert not pending.done()
        state["w"].zero_()
        state["b"].zero_()
    pending.result()
    assert_same(store.load(1), lazy_state())


def test_the_background_copies_what_nobody_stages(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1) as release:
        state = lazy_state()
        pending = store.save_async(1, state, lazy=True)
        assert not pending.wait_staged(0.01)
        release()
        assert pending.wait_staged()
        state["w"].zero_()
    pending.result()
    assert_same(store.load(1), lazy_state())


@pytest.mark.parametrize("name", ["w", "view"])
def test_a_change_before_the_copy_fails_the_save_and_leaves_no_checkpoint(disk_path, name):
    store = penstock.CheckpointStore(disk_path / "store")
    state = lazy_state()
    state["view"] = state["w"][:100_000]
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        state[name].add_(1)
    with pytest.raises(penstock.StateMismatchError, match=r'"w" changed .*guard') as caught:
        pending.result()
    assert caught.value.path == pending.path
    assert pending.wait_staged(0)
    assert store.steps() == []
    assert os.listdir(pending.path) == []
    store.save(2, state)
    assert store.steps() == [2]


def step_once(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def make_training(kind):
    """A model and an optimizer that changes every element at each step."""
    torch.manual_seed(3)
    # Some tensors are copied by the call itself, and some are not.
    model = torch.nn.Sequential(torch.nn.Linear(301, 200), torch.nn.Linear(200, 100))
    return model, OPTIMIZERS[kind](model.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_without_a_guard_fails_the_save(disk_path, kind):
    """Also a fused one, whose changes PyTorch does not count."""
    store = penstock.CheckpointStore(disk_path / "store")
    model, optimizer = make_training(kind)
    step_once(optimizer)
    states = [model.state_dict(), [model.state_dict(), optimizer.state_dict()]]
    states.append(optimizer.state_dict())
    for step, state in enumerate(states):
        with held(store, step):
            pending = store.save_async(step, state, lazy=True)
            step_once(optimizer)
        assert isinstance(pending.exception(), penstock.StateMismatchError)
    assert store.steps() == []


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_of_an_optimizer_fails_no_save_that_it_does_not_change(disk_path, kind):
    store = penstock.CheckpointStore(disk_path / "store")
    model, optimizer = make_training(kind)
    _, stranger = make_training(kind)
    expected = copy.deepcopy(model.state_dict())
    with held(store, 1):
        pending = store.save_async(1, model.state_dict(), lazy=True)
        step_once(stranger)
        # Whoever has staged is as safe as with a guard.
        pending.stage()
        step_once(optimizer)
    pending.result()
    assert_same(store.load(1), expected)
    step_once(optimizer)
    expected = copy.deepcopy(model.state_dict())
    with held(store, 2) as release:
        pending = store.save_async(2, model.state_dict(), lazy=True)
        release()
        assert pending.wait_staged()
        step_once(optimizer)
    pending.result()
    assert_same(store.load(2), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_guard_makes_the_step_copy_first(disk_path, kind):
    store = penstock.CheckpointStore(disk_path / "store")
    model, optimizer = make_training(kind)
    step_once(optimizer)
    guard = penstock.guard(optimizer)
    state = [model.state_dict(), optimizer.state_dict()]
    expected = copy.deepcopy(state)
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        step_once(optimizer)
        assert guard.waited_seconds > 0
        assert pending.wait_staged(0)
        assert not pending.done()
    pending.result()
    assert_same(store.load(1), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_guard_that_is_removed_guards_no_more(disk_path, kind):
    store = penstock.CheckpointStore(disk_path / "store")
    model, optimizer = make_training(kind)
    guards = [penstock.guard(optimizer) for _ in range(2)]
    for step, guard in enumerate(guards):
        guard.remove()
        with held(store, step):
            pending = store.save_async(step, model.state_dict(), lazy=True)
            step_once(optimizer)
        error = pending.exception()
        assert isinstance(error, penstock.StateMismatchError if step else type(None))


def test_a_guard_waits_for_the_saves_of_every_store(disk_path):
    stores = [penstock.CheckpointStore(disk_path / name) for name in "ab"]
    model, optimizer = make_training("adamw")
    penstock.guard(optimizer)
    expected = copy.deepcopy(model.state_dict())
    with held(stores[0], 1), held(stores[1], 1):
        pending = [store.save_async(1, model.state_dict(), lazy=True) for store in stores]
        step_once(optimizer)
    for one, store in zip(pending, stores, strict=True):
        one.result()
        assert_same(store.load(), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_that_race_with_lazy_saves_never_tear_one(memory_path, kind):
    store = penstock.CheckpointStore(memory_path / "store")
    model, optimizer = make_training(kind)
    step_once(optimizer)
    guard = penstock.guard(optimizer)
    saved = []

    def check(step, expected):
        assert_same(store.load(step), expected)
        store.delete(step, force=True)

    for step in range(STEPS):
        state = [model.state_dict(), optimizer.state_dict(), step]
        saved.append((step, copy.deepcopy(state)))
        store.save_async(step, state, lazy=True)
        if step % 3 == 1:
            # The save is further on when the step comes.
            time.sleep(0.0005 * (step % 5))
        step_once(optimizer)
        if len(saved) > 1:
            check(*saved.pop(0))
    store.wait()
    check(*saved.pop())
    assert guard.waited_seconds > 0
    assert store.steps() == []


def test_a_thread_that_changes_everything_once_all_is_staged_tears_nothing(disk_path):
    """It hammers from the moment in which `stage` returns, while the save writes."""
    options = penstock.Options(io_threads=2, direct="off")
    store = penstock.CheckpointStore(disk_path / "store", options=options)
    state = [torch.full((MIB,), 7.0), np.full(MIB, 7.0)]
    expected = copy.deepcopy(state)
    staged, stop = threading.Event(), threading.Event()

    def hammer():
        staged.wait()
        while not stop.is_set():
            state[0].add_(1)
            np.add(state[1], 1, out=state[1])

    for step in range(10):
        state[0].fill_(7)
        state[1].fill(7)
        staged.clear()
        stop.clear()
        thread = threading.Thread(target=hammer, daemon=True)
        thread.start()
        pending = store.save_async(step, state, lazy=step % 2 == 0)
        pending.stage()
        staged.set()
        pending.result()
        stop.set()
        thread.join()
        assert_same(store.load(step), expected)
        store.delete(step, force=True)


def test_small_tensors_are_saved_as_they_were_at_the_call(disk_path):
    """Counters, losses, states of random number generators: no stage, no guard."""
    store = penstock.CheckpointStore(disk_path / "store")

    def make():
        return {
            "large": torch.ones(MIB),
            "small": torch.zeros(16 << 10),
            "scalar": torch.tensor(1),
            "array": np.zeros(8 << 10),
            "long": bytearray(5000),
            "strided": torch.arange(5000).reshape(50, 100).t(),
        }

    state = make()
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        for name, value in state.items():
            if name == "long":
                value[:] = b"x" * 5000
            elif name != "large":
                value += 1
    pending.result()
    assert_same(store.load(1), make())


def test_of_more_small_tensors_than_are_copied_at_once_none_is_torn(disk_path):
    """64 MiB of them are: a change of the rest is noticed."""
    store = penstock.CheckpointStore(disk_path / "store")
    state = [torch.zeros(16 << 10) for _ in range(1100)]
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        state[0].add_(1)
        state[100].add_(1)
    pending.result()
    assert_same(store.load(1), [torch.zeros(16 << 10) for _ in range(1100)])
    with held(store, 2):
        pending = store.save_async(2, state, lazy=True)
        state[-1].add_(1)
    assert isinstance(pending.exception(), penstock.StateMismatchError)


def test_tensors_of_inference_mode_are_saved(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    with torch.inference_mode():
        state = {"w": torch.arange(2 * MIB), "s": torch.ones(3)}
        expected = copy.deepcopy(state)
        for step, lazy in enumerate([False, True]):
            pending = store.save_async(step, state, lazy=lazy)
            pending.stage()
            state["w"].zero_()
            pending.result()
            assert_same(store.load(step), expected)
            state["w"].copy_(expected["w"])


@pytest.mark.parametrize("kind", ["array", "bytearray", "inference"])
def test_what_nobody_counts_the_changes_of_is_copied_at_the_call(disk_path, kind):
    store = penstock.CheckpointStore(disk_path / "store")
    data = np.arange(2 * MIB, dtype=np.uint8)
    with torch.inference_mode():
        tensor = torch.from_numpy(data).clone()
    value = {"array": data, "bytearray": bytearray(data), "inference": tensor}[kind]
    expected = copy.deepcopy(value)
    with held(store, 1) as release, torch.inference_mode(kind == "inference"):
        pending = store.save_async(1, {"value": value, "again": value[5:]}, lazy=True)
        value[:] = bytes(2 * MIB) if kind == "bytearray" else 0
        release()
    pending.result()
    assert_same(store.load(1), {"value": expected, "again": expected[5:]})


def test_any_number_of_small_arrays_is_copied_at_the_call(disk_path):
    """More than the native module copies by itself."""
    store = penstock.CheckpointStore(disk_path / "store")
    state = {str(number): np.zeros(16_000, np.float32) for number in range(1200)}
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        for array in state.values():
            array += 1
    if pending.exception() is not None:
        raise pending.exception()
    assert not any(array.any() for array in store.load(1).values())


def replace_data(parameter):
    parameter.data = torch.ones(1)


def replace_storage(parameter):
    with torch.no_grad():
        parameter.set_(torch.ones(3 * MIB))


def swap(parameter):
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.ones(3 * MIB)))


def convert(parameter):
    module = torch.nn.Module()
    module.w = parameter
    module.half()


@pytest.mark.parametrize("replace", [replace_data, replace_storage, swap, convert])
def test_a_tensor_that_is_replaced_keeps_its_memory_until_it_is_copied(disk_path, replace):
    store = penstock.CheckpointStore(disk_path / "store")
    parameter = torch.nn.Parameter(torch.zeros(3 * MIB))
    with held(store, 1):
        pending = store.save_async(1, {"w": parameter}, lazy=True)
        replace(parameter)
        # Where its memory was there is another's soon.
        others = [torch.full((3 * MIB,), 7.0) for _ in range(4)]
    if pending.exception() is None:
        assert_same(store.load(1), {"w": torch.zeros(3 * MIB)})
    else:
        assert isinstance(pending.exception(), penstock.StateMismatchError)
    assert len(others) == 4


def tied_states():
    """What is tied, the state, what changes (of the state, or itself), what is stored then."""
    parameter = torch.nn.Parameter(torch.zeros(MIB))
    yield "data", {"d": parameter.data, "p": parameter}, parameter, None
    array = np.zeros(MIB, np.float32)
    yield "two tensors", {"x": torch.from_numpy(array), "y": torch.from_numpy(array)}, "y", None
    array = np.zeros(MIB, np.float32)
    yield "array last", {"t": torch.from_numpy(array), "a": array}, array, 0
    array = np.zeros(MIB, np.float32)
    yield "a part", {"w": torch.from_numpy(array), "n": array[100:]}, array, 0
    array = np.zeros(MIB, np.float32)
    yield "another type", {"w": torch.from_numpy(array), "n": array.view(np.int32)}, array, 0


@pytest.mark.parametrize("case", [*tied_states()], ids=lambda case: case[0])
def test_what_shares_memory_with_a_tensor_does_not_change_it_unnoticed(disk_path, case):
    """It is noticed, or copied at the call where nobody counts."""
    _, state, changed, expected = case
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1), torch.no_grad():
        pending = store.save_async(1, state, lazy=True)
        target = state[changed] if isinstance(changed, str) else changed
        target += 1
    if expected is None:
        with pytest.raises(penstock.StateMismatchError, match="changed"):
            pending.result()
    else:
        pending.result()
        assert not any(value.any() for value in store.load(1).values())


def test_running_statistics_are_copied_at_the_call(disk_path):
    """Their changes in a forward are not counted; they are small, and the smallest come first."""
    store = penstock.CheckpointStore(disk_path / "store")
    many = [torch.zeros(16_000) for _ in range(1200)]
    norm = torch.nn.BatchNorm1d(100)
    state = {"many": many, "norm": norm.state_dict()}
    expected = copy.deepcopy(norm.state_dict())
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        norm(torch.randn(8, 100) + 9)
    pending.result()
    assert_same(dict(store.load(1, keys="norm.*")["norm"]), dict(expected))


@pytest.fixture
def lone_job():
    """This process as a job of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_nobody_counts_the_changes_of_is_copied_for_a_job_too(disk_path, lone_job):
    store = penstock.CheckpointStore(disk_path / "store")
    with torch.inference_mode():
        whole = torch.arange(2 * MIB).reshape(1024, 2048)
        mesh = init_device_mesh("cpu", (1,))
        state = {
            "plain": whole.clone(),
            "turned": whole.clone().t(),
            "sharded": DTensor.from_local(whole.clone(), mesh, [Shard(0)], run_check=False),
        }
        with held(store, 1) as release:
            pending = store.save_async(1, state, lazy=True)
            for tensor in state.values():
                getattr(tensor, "_local_tensor", tensor).zero_()
            release()
        pending.result()
    loaded = store.load(1)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, whole.t() if name == "turned" else whole), name


def test_a_save_whose_progress_cannot_be_shown_never_begins(disk_path, lone_job):
    store = penstock.CheckpointStore(disk_path / "store")
    with pytest.raises(TypeError, match="progress"):
        store.save(1, {"w": torch.ones(3)}, progress="yes")
    assert not (disk_path / "store").exists()
    store.save(2, {"w": torch.ones(3)})
    assert store.steps() == [2]


@pytest.mark.parametrize("has_saved", [False, True])
def test_a_fork_does_not_speak_for_its_rank(disk_path, lone_job, has_saved):
    store = penstock.CheckpointStore(disk_path / "store")
    if has_saved:
        store.save(1, {"w": torch.ones(3)})
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(penstock.PenstockError, match="no_dist=True"):
                store.save(2, {"w": torch.ones(3)})
            with pytest.raises(penstock.PenstockError, match="no_dist=True"):
                penstock.CheckpointStore(disk_path / "other").save(2, {"w": torch.ones(3)})
            alone = penstock.CheckpointStore(disk_path / "alone", no_dist=True)
            alone.save(3, {"w": torch.ones(3)})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    store.save(4, {"w": torch.ones(3)})
    assert store.latest() == 4


@pytest.mark.parametrize("is_local", [False, True], ids=["whole", "local"])
def test_a_change_of_a_dtensor_fails_a_lazy_save(disk_path, lone_job, is_local):
    store = penstock.CheckpointStore(disk_path / "store")
    tensor = distribute_tensor(torch.ones(2 * MIB), init_device_mesh("cpu", (1,)), [Shard(0)])
    with held(store, 1) as release:
        pending = store.save_async(1, {"w": tensor}, lazy=True)
        (tensor.to_local() if is_local else tensor).add_(1)
        release()
    with pytest.raises(penstock.StateMismatchError, match="changed"):
        pending.result()
    assert store.steps() == []


def test_a_lazy_state_is_held_until_it_is_staged_and_no_longer(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    gc.collect()
    gc.disable()
    try:
        with held(store, 1):
            # The tensor's memory is that of the array below.
            below = np.ones(MIB, np.float32)
            state = {"t": torch.from_numpy(below), "a": np.ones(MIB)}
            memory, array = weakref.ref(below), weakref.ref(state["a"])
            pending = store.save_async(1, state, lazy=True)
            del state, below
            assert memory() is not None
            # It is copied.
            assert array() is None
            pending.stage()
            assert memory() is None
        pending.result()
        assert_same(store.load(1), {"t": torch.ones(MIB), "a": np.ones(MIB)})
    finally:
        gc.enable()


# One save at a time.


def test_of_a_busy_store_a_save_is_skipped_or_refused_or_waits(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1) as release:
        first = store.save_async(1, {"w": torch.ones(100)})
        assert store.save_async(2, {"w": 2}, if_busy="skip") is None
        with pytest.raises(penstock.SaveInProgressError) as caught:
            store.save_async(2, {"w": 2}, if_busy="error")
        assert caught.value.path == first.path
        threading.Timer(0.1, release).start()
        third = store.save_async(3, {"w": 3}, if_busy="wait")
        assert first.done()
        assert third.stall_seconds > first.stall_seconds >= 0
    third.result()
    assert store.steps() == [1, 3]
    for step, policy in enumerate(["skip", "error"], start=4):
        pending = store.save_async(step, {"w": 1}, if_busy=policy)
        pending.result()
    assert store.steps() == [1, 3, 4, 5]


@pytest.mark.parametrize("how", ["save", "wait", "close", "with"])
def test_what_comes_next_waits_for_the_save_under_way(disk_path, how):
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1) as release:
        pending = store.save_async(1, {"w": torch.ones(100)})
        threading.Timer(0.1, release).start()
        if how == "save":
            store.save(2, {"w": 2})
        elif how == "with":
            with store:
                pass
        else:
            getattr(store, how)()
        assert pending.done()
    assert store.load(1)["w"].sum() == 100
    pending.result()


def test_two_stores_do_not_wait_for_each_other(disk_path):
    one, other = (penstock.CheckpointStore(disk_path / name) for name in "ab")
    with held(one, 1):
        pending = one.save_async(1, {"w": torch.ones(MIB)})
        for step in range(3):
            beside = other.save_async(step, {"w": torch.ones(MIB)}, if_busy="wait", lazy=True)
            beside.result()
        other.save(9, {})
        other.close()
        assert not pending.done()
    pending.result()
    assert one.steps() == [1]
    assert other.steps() == [0, 1, 2, 9]


def test_threads_that_share_a_store_lose_nothing(disk_path):
    store = penstock.CheckpointStore(disk_path / "store", options=penstock.Options(direct="off"))
    failures = []

    def work(number):
        try:
            for step in range(number * 100, number * 100 + 15):
                store.save_async(step, {"w": np.full(100_000, step)}, lazy=step % 2 == 0).result()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(store.steps()) == 60
    for step in store.steps():
        assert_same(store.load(step), {"w": np.full(100_000, step)})


# Errors.


def test_a_failure_is_the_results_every_time_and_nobody_elses(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)
    pending = store.save_async(1, {"w": torch.ones(MIB)})
    for _ in range(2):
        with pytest.raises(penstock.StorageError) as caught:
            pending.result()
        assert caught.value.path == pending.path
    assert isinstance(pending.exception(), penstock.StorageError)
    assert pending.done()
    assert pending.wait_staged(0)
    pending.stage()
    assert "failed" in repr(pending)
    assert tree(disk_path) == ["store", "store/step-0000000001"]
    store.save_async(2, {"w": 2}).result()
    store.wait()
    store.save(3, {"w": 3})
    store.close()
    assert store.steps() == [2, 3]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("how", ["save", "save_async", "skip", "wait", "close", "with"])
def test_a_failure_that_nobody_asked_for_comes_up_once(disk_path, how, lazy):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)
    pending = store.save_async(1, {"w": torch.ones(MIB)}, lazy=lazy)
    while not pending.done():
        time.sleep(0.001)

    def act():
        if how == "save":
            store.save(2, {"w": 2})
        elif how == "save_async":
            store.save_async(2, {"w": 2}).result()
        elif how == "skip":
            store.save_async(2, {"w": 2}, if_busy="skip").result()
        elif how == "with":
            with store:
                pass
        else:
            getattr(store, how)()

    with pytest.raises(penstock.StorageError) as caught:
        act()
    assert caught.value.path == pending.path
    assert store.steps() == []
    act()
    store.save(3, {"w": 3})
    assert store.steps()[-1] == 3
    assert isinstance(pending.exception(), penstock.StorageError)


def test_a_disk_that_is_full_fails_the_save_and_nothing_stays_behind(tmp_path, need_root):
    with mounted("tmpfs", tmp_path / "small", 16 * MIB) as small:
        store = penstock.CheckpointStore(small / "store")
        store.save(0, {"w": 0})
        for lazy in (False, True):
            pending = store.save_async(1, {"w": torch.ones(8 * MIB)}, lazy=lazy)
            with pytest.raises(penstock.StorageError) as caught:
                pending.result()
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.needed_bytes > 32 * MIB > caught.value.free_bytes
            assert not os.path.exists(pending.path)
        store.save_async(2, {"w": torch.ones(MIB)}).result()
        assert store.steps() == [0, 2]
        assert store.sweep() == []


def test_a_directory_that_is_removed_under_a_save_fails_it(disk_path):
    store = penstock.CheckpointStore(disk_path / "store", options=SLOWLY)
    pending = store.save_async(1, torch.ones(32 * MIB), lazy=True)
    while not pending.progress().bytes_done:
        assert not pending.done()
        time.sleep(0.0005)
    shutil.rmtree(store.root)
    assert isinstance(pending.exception(), penstock.PenstockError)
    store.save_async(2, {"w": 2}).result()
    assert store.steps() == [2]


def test_what_can_be_refused_at_the_call_is_refused_there(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    store.save(1, {"w": 1})
    before = tree(disk_path)
    for lazy in (False, True):
        with pytest.raises(penstock.CheckpointExistsError):
            store.save_async(1, {"w": 2}, lazy=lazy)
        with pytest.raises(penstock.UnsupportedStateError, match=r"a\.0"):
            store.save_async(2, {"a": [object()]}, lazy=lazy)
        with pytest.raises(ValueError, match="if_busy"):
            store.save_async(2, {}, if_busy="later", lazy=lazy)
        with pytest.raises(ValueError, match="step"):
            store.save_async(-1, {}, lazy=lazy)
        with pytest.raises(TypeError):
            store.save_async("1", {}, lazy=lazy)
        with pytest.raises(TypeError):
            store.save_async(2, {}, metadata={"x": object()}, lazy=lazy)
    assert tree(disk_path) == before
    store.wait()
    store.save_async(1, {"w": 3}, overwrite=True).result()
    assert store.load(1) == {"w": 3}


def test_a_step_that_is_being_saved_exists_by_the_time_it_counts(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1) as release:
        pending = store.save_async(1, {"w": 1})
        threading.Timer(0.05, release).start()
        with pytest.raises(penstock.CheckpointExistsError):
            store.save_async(1, {"w": 2})
    pending.result()
    assert store.load(1) == {"w": 1}


def test_a_save_by_somebody_else_is_not_replaced(disk_path):
    """Whoever is faster: nearly always the one who does not wait for the lock."""
    store = penstock.CheckpointStore(disk_path / "store")
    other = None
    with held(store, 1):
        pending = store.save_async(1, {"w": 1})
        os.rename(store.path(1), disk_path / "aside")
        try:
            penstock.save(store.path(1), {"w": "other"}, step=1)
        except penstock.CheckpointExistsError as error:
            other = error
    own = pending.exception()
    assert (own is None) != (other is None)
    assert own is None or isinstance(own, penstock.CheckpointExistsError)
    assert store.load(1) == {"w": 1 if own is None else "other"}


@pytest.mark.parametrize("lazy", [False, True])
def test_an_error_does_not_keep_the_state(disk_path, lazy):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)

    def fail_to_save():
        state = {"t": torch.ones(MIB), "a": np.ones(MIB)}
        pending = store.save_async(1, state, lazy=lazy)
        leaves = [weakref.ref(leaf) for leaf in state.values()]
        with pytest.raises(penstock.StorageError):
            pending.result()
        return pending, leaves

    pending, leaves = fail_to_save()
    kept = pending.exception().with_traceback(None)
    del pending
    # The frame of whoever caught the error was in its traceback.
    gc.collect()
    assert [leaf() for leaf in leaves] == [None, None]
    assert isinstance(kept, penstock.StorageError)


def test_failures_that_were_heard_of_do_not_pile_up(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)
    gone = []
    for how in ("result", "wait", "cancel"):
        pending = store.save_async(1, {"w": torch.ones(1000)})
        gone.append(weakref.ref(pending))
        if how == "result":
            assert pending.exception() is not None
        elif how == "wait":
            with pytest.raises(penstock.StorageError):
                store.wait()
        else:
            pending.cancel()
            store.wait()
        del pending
    store.close()
    gc.collect()
    assert [one() for one in gone] == [None] * 3


# How it is going.


def test_what_is_under_way_says_so(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1):
        pending = store.save_async(1, {"w": torch.ones(MIB)})
        assert (pending.step, pending.path) == (1, store.path(1))
        assert pending.stall_seconds > 0
        for wait in (pending.result, pending.exception):
            for timeout in (0, 0.01):
                with pytest.raises(TimeoutError, match="step-0000000001 is still"):
                    wait(timeout)
        assert not pending.done()
        assert "running" in repr(pending)
        assert pending.path in repr(pending)
        done, total = pending.progress()
        assert done == 0
        assert total >= 4 * MIB
    report = pending.result(60)
    assert pending.done()
    assert pending.exception(0) is None
    assert pending.result(0) is report
    assert "saved" in repr(pending)
    assert report.step == 1
    assert report.phases["stage"] > 0
    assert report.phases.keys() >= {"flatten", "plan", "stage", "write", "sync", "commit"}
    assert report.seconds >= pending.stall_seconds
    assert pending.progress().bytes_done == pending.progress().bytes_total == total
    assert penstock.inspect(pending.path).id == report.checkpoint_id


@pytest.mark.parametrize("lazy", [False, True])
def test_progress_rises_to_the_whole(disk_path, lazy):
    store = penstock.CheckpointStore(disk_path / "store", options=SLOWLY)
    pending = store.save_async(1, torch.ones(16 * MIB), lazy=lazy)
    seen = [pending.progress()]
    while not pending.done():
        seen.append(pending.progress())
    seen.append(pending.progress())
    done = [one.bytes_done for one in seen]
    assert done == sorted(done)
    assert {one.bytes_total for one in seen} == {seen[-1].bytes_done}
    assert seen[-1].bytes_done >= 64 * MIB


def test_every_save_that_copies_something_reports_its_stage(memory_path):
    store = penstock.CheckpointStore(memory_path / "store")
    for _ in range(50):
        report = store.save_async(1, {"w": np.ones(2000)}, overwrite=True).result()
        assert "stage" in report.phases


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_save_that_is_cancelled_leaves_nothing_and_nobody_else_hears_of_it(disk_path, lazy, when):
    store = penstock.CheckpointStore(disk_path / "store", options=SLOWLY)
    store.save(0, {"w": 0})
    state = torch.ones(16 * MIB)
    with held(store, 1) as release:
        os.rmdir(store.path(1)) if when == "while" else None
        pending = store.save_async(1, state, lazy=lazy)
        if when == "while":
            while not pending.progress().bytes_done:
                assert not pending.done()
        pending.cancel()
        release()
        with pytest.raises(penstock.SaveCancelledError):
            pending.result()
        assert pending.wait_staged(0)
    assert tree(store.root) in (
        ["step-0000000000", *tree_of_a_step(store, 0)],
        ["step-0000000000", *tree_of_a_step(store, 0), "step-0000000001"],
    )
    pending = store.save_async(1, state, lazy=lazy)
    pending.cancel()
    # Whoever cancelled it knows.
    store.save(2, {"w": 2})
    assert store.steps() == [0, 2]


def tree_of_a_step(store, step):
    root = Path(store.path(step))
    return [f"{root.name}/{name}" for name in tree(root)]


def test_to_cancel_what_is_saved_changes_nothing(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    pending = store.save_async(1, {"w": 1})
    pending.result()
    pending.cancel()
    pending.result()
    assert store.load(1) == {"w": 1}


# What it takes.


def test_other_threads_run_while_a_state_is_staged_and_written(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    with Ticker() as ticker:
        ticks = []
        with held(store, 1):
            pending = store.save_async(1, torch.ones(64 * MIB), lazy=True)
            while ticker.ticks < 2:
                time.sleep(0.001)
            before = ticker.ticks
            pending.stage()
            ticks.append(ticker.ticks - before)
        before = ticker.ticks
        pending.result()
        ticks.append(ticker.ticks - before)
    tell(ticks)
    assert min(ticks) > 0


LEAKS = """
    import json, os, sys, threading
    import numpy as np, psutil, torch, penstock
    torch.set_num_threads(1)
    store = penstock.CheckpointStore(sys.argv[1], keep_last=2)
    state = {"w": torch.ones(50_000), "a": np.ones(1000), "step": 0, "text": "x" * 1000}
    me = psutil.Process()
    def measure():
        store.wait()
        return me.memory_info().rss, me.num_fds(), threading.active_count(), me.num_threads()
    for step in range(1000):
        pending = store.save_async(step, state, lazy=step % 2 == 0)
        if step % 2 == 0:
            pending.stage()
        state["w"].add_(1)
        if step == 30:
            before = measure()
    print(json.dumps([before, measure(), store.steps()]))
"""


def test_a_thousand_saves_leak_no_memory_and_no_files_and_no_threads(memory_path):
    before, after, steps = run_child(LEAKS, memory_path / "store")
    tell(before, after)
    # The allocator's and the interpreter's own; a state has 200 KB, and 970 were saved.
    assert after[0] - before[0] <= 6 * MIB
    assert after[1:3] == before[1:3]
    # One that was joined may be listed for a moment.
    assert after[3] <= before[3] + 1
    assert steps == [998, 999]


def test_failed_saves_leave_no_files_open_and_no_threads(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)
    store.save_async(2, {"w": torch.ones(MIB)}).result()
    before = settled()
    for lazy in (False, True) * 5:
        assert store.save_async(1, {"w": torch.ones(MIB)}, lazy=lazy).exception() is not None
        pending = store.save_async(3, {"w": torch.ones(MIB)}, lazy=lazy)
        pending.cancel()
        pending.exception()
        store.delete(3, force=True) if 3 in store.steps() else None
    assert_settles_at(before)


# Retention, marks, metadata.


def test_what_a_store_keeps_it_keeps_of_saves_in_the_background_too(disk_path):
    asked = []

    def keep(step, metadata):
        asked.append((step, metadata))
        return step == 2

    store = penstock.CheckpointStore(disk_path / "store", keep_last=2, keep_every=5, keep=keep)
    for step in range(9):
        store.save_async(step, {"w": step}, metadata={"step": step}, lazy=step % 2 == 0)
    pending = store.save_async(9, {"w": 9}, metadata={"step": 9})
    pending.result()
    assert store.steps() == [0, 2, 5, 8, 9]
    assert all(metadata == {"step": step} for step, metadata in asked)
    assert penstock.inspect(store.path(9)).metadata == {"step": 9}
    assert penstock.inspect(store.path(9)).step == 9


def test_a_newest_good_step_is_kept_and_a_save_leaves_no_mark(disk_path):
    store = penstock.CheckpointStore(disk_path / "store", keep_last=1)
    store.save_async(1, {"w": torch.ones(100)}).result()
    assert store.marks() == {}
    store.load(1)
    assert store.marks()[1].is_good
    for step in (2, 3, 4):
        store.save_async(step, {"w": torch.ones(100)}).result()
    assert store.steps() == [1, 4]
    store.save_async(1, {"w": torch.zeros(100)}, overwrite=True).result()
    assert 1 not in store.marks()


def test_a_function_keep_that_raises_fails_no_save(disk_path):
    def keep(step, metadata):
        raise RuntimeError("what do I know")

    store = penstock.CheckpointStore(disk_path / "store", keep_last=1, keep=keep)
    store.save_async(0, {"w": 0}).result()
    with held(store, 1) as release:
        pending = store.save_async(1, {"w": 1})
        with pytest.warns(penstock.PenstockWarning, match="what do I know"):
            settle(pending, release)
    assert store.steps() == [0, 1]


def settle(pending, release):
    release()
    pending.result()


# The end of the process.

END = """
    import os, signal, sys, threading, time
    import numpy as np, penstock

    root, lazy, end = sys.argv[1:]
    store = penstock.CheckpointStore(root, keep_last=1)
    store.save(0, {"w": 0})
    state = {"w": np.full(32 << 20, 7, np.uint8)}
    pending = store.save_async(1, state, lazy=lazy == "True")
    if end == "failure":
        os.makedirs(store.path(3) + "/manifest.json")
        store.save_async(2, state, overwrite=True).result()
    if end == "exit":
        sys.exit(3)
    if end == "exception":
        raise RuntimeError("boom")
"""


def run_to_its_end(script, *arguments, **environment):
    return forks.run(
        ["-c", textwrap.dedent(script), *arguments], timeout=100, env=os.environ | environment
    )


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("end", "code"), [("end", 0), ("exit", 3), ("exception", 1)])
def test_a_process_that_ends_completes_its_save_first(disk_path, lazy, end, code):
    done = run_to_its_end(END, disk_path / "store", lazy, end)
    assert done.returncode == code, done.stderr
    assert "penstock:" not in done.stderr
    assert ("boom" in done.stderr) == (end == "exception")
    store = penstock.CheckpointStore(disk_path / "store")
    # What it no longer keeps is gone as well.
    assert store.steps() == [1]
    assert (store.load()["w"] == 7).all()


FAIL = """
    import os, sys
    import numpy as np, penstock

    root, how = sys.argv[1:]
    store = penstock.CheckpointStore(root)
    open(store.path(1), "w").close()
    pending = store.save_async(1, {"w": np.ones(1 << 20)})
    if how == "exception":
        assert pending.exception() is not None
    elif how == "wait":
        try:
            store.wait()
        except penstock.StorageError:
            pass
    elif how == "cancel":
        pending.cancel()
    elif how == "dropped":
        del pending, store
"""


@pytest.mark.parametrize("how", ["nobody", "dropped", "exception", "wait", "cancel"])
def test_a_failure_that_nobody_asked_for_is_on_standard_error_at_the_end(disk_path, how):
    root = disk_path / "store"
    root.mkdir()
    done = run_to_its_end(FAIL, root, how)
    assert done.returncode == 0, done.stderr
    if how in ("nobody", "dropped"):
        [line] = done.stderr.splitlines()
        assert line.startswith(f"penstock: {root}/step-0000000001 was not saved: ")
        assert "irectory" in line
    else:
        assert done.stderr == ""


INTERRUPTED_END = """
    import os, signal, sys, threading
    import numpy as np, penstock

    signal.signal(signal.SIGINT, signal.default_int_handler)
    root, engine, share = sys.argv[1:]
    options = penstock.Options(
        engine=engine, direct="off", queue_depth=1, io_threads=1, extent_bytes=1 << 20
    )
    store = penstock.CheckpointStore(root, options=options)
    pending = store.save_async(1, {"w": np.ones(64 << 20, np.uint8)}, lazy=True)

    def interrupt():
        # The main thread is at its end and waits for the save.
        main = threading.main_thread()
        while main.is_alive():
            pass
        while pending.progress().bytes_done < float(share) * (64 << 20) and not pending.done():
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
"""


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_ctrl_c_at_the_end_says_what_is_lost(disk_path, engine):
    outcomes = set()
    for number, share in enumerate([0, 0.3, 0.7, 1]):
        root = disk_path / f"store-{number}"
        done = run_to_its_end(INTERRUPTED_END, root, engine, share)
        assert done.returncode in (0, -signal.SIGINT), done.stderr
        store = penstock.CheckpointStore(root)
        is_lost = f"penstock: {store.path(1)} was " in done.stderr
        assert is_lost != (store.steps() == [1]), done.stderr
        if not is_lost:
            assert (store.load()["w"] == 1).all()
        outcomes.add(is_lost)
        store.sweep()
        store.save(2, {"w": 2})
    tell(outcomes)
    assert True in outcomes, "every save was faster than the signal: nothing was tested"


INTERRUPTED_WAIT = """
    import fcntl, json, os, signal, sys, threading
    import numpy as np, penstock

    signal.signal(signal.SIGINT, signal.default_int_handler)
    root, how = sys.argv[1:]
    options = penstock.Options(staging_bytes=4 << 20) if how == "staging" else None
    store = penstock.CheckpointStore(root, options=options)
    os.makedirs(store.path(1))
    fd = os.open(store.path(1), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    state = {"w": np.ones(8 << 20)}
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    pending = None
    try:
        if how == "staging":
            timer.start()
            store.save_async(1, state)
        else:
            pending = store.save_async(1, state, lazy=how == "wait_staged")
            timer.start()
            if how == "save":
                store.save(2, {"w": 2})
            elif how == "wait":
                store.wait()
            else:
                getattr(pending, how)()
        outcome = "went on"
    except KeyboardInterrupt:
        outcome = "interrupted"
    still = pending is not None and not pending.done()
    fcntl.flock(fd, fcntl.LOCK_UN)
    # The save in an emergency.
    store.save(3, {"w": 3})
    print(json.dumps([outcome, still, store.steps()]))
"""


@pytest.mark.parametrize("how", ["result", "exception", "wait_staged", "wait", "save"])
def test_ctrl_c_ends_the_wait_and_not_the_save(disk_path, how):
    outcome = run_child(INTERRUPTED_WAIT, disk_path / "store", how)
    assert outcome == ["interrupted", True, [1, 3]]


def test_ctrl_c_while_the_state_is_staged_ends_the_save_and_the_next_one_works(disk_path):
    outcome = run_child(INTERRUPTED_WAIT, disk_path / "store", "staging")
    assert outcome == ["interrupted", False, [3]]


def test_after_any_of_12_kills_the_newest_acknowledged_step_loads(disk_path):
    root = disk_path / "store"
    engines = [pair for pair in MATRIX if pair[0] == "threads" or uring_refusal() is None]
    newest, incomplete = -1, 0
    for kill in range(12):
        process = Victim("train_async", root, *engines[kill % len(engines)])
        process.kill_after(0.01 + 0.17 * kill / 12)
        newest = max([newest, *process.acknowledged])
        store = penstock.CheckpointStore(root)
        incomplete += any(info.state == "incomplete" for info in store.scan())
        assert not [info for info in store.scan() if info.state == "damaged"]
        if newest < 0:
            continue
        state = store.load()
        assert state["step"] >= newest
        assert_same(state, victim.make_state(state["step"]))
        newest = state["step"]
    tell(f"step {newest}; {incomplete} of 12 kills in the middle of a save")
    assert newest > 0
    assert incomplete > 0, "no kill came in the middle of a save: nothing was tested"


# Forks.

FORK = """
    import json, os, sys, time
    import numpy as np, penstock

    root, lazy, how = sys.argv[1:]
    options = penstock.Options(
        queue_depth=1, io_threads=1, extent_bytes=1 << 20, staging_bytes=64 << 20
    )
    store = penstock.CheckpointStore(root, options=options)
    state = {"w": np.full(96 << 20, 7, np.uint8)}
    pending = store.save_async(1, state, lazy=lazy == "True")
    while not pending.progress().bytes_done:
        time.sleep(0.0005)

    def refuses(call):
        try:
            call()
        except penstock.PenstockError as error:
            return "fork" in str(error)
        return False

    def in_child():
        calls = pending.result, pending.exception, pending.stage, pending.cancel, \
            pending.wait_staged
        is_right = all(map(refuses, calls)) and (pending.done() or "running" in repr(pending))
        store.wait()
        # It may save on its own.
        other = store.save_async(2, {"w": np.full(16 << 20, 9, np.uint8)})
        other.result()
        store.save(3, {"w": 3})
        store.close()
        return is_right

    if how == "multiprocessing":
        import multiprocessing
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=lambda: queue.put(in_child()))
        child.start()
        is_right = queue.get()
        child.join()
        code = child.exitcode
    else:
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writable, json.dumps(in_child()).encode())
            if how == "exit":
                sys.exit(0)
            del pending, store
            os._exit(0)
        os.close(writable)
        is_right = json.loads(os.read(readable, 100) or "false")
        _, code = os.waitpid(child, 0)
    was_running = not pending.done()
    state["w"][:] = 0 if lazy == "False" else 7
    report = pending.result()
    print(json.dumps([is_right, code, bool((store.load(1)["w"] == 7).all()), store.steps()]))
"""


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("how", ["exit", "_exit", "multiprocessing"])
def test_a_forked_child_neither_harms_the_save_nor_waits_for_it(disk_path, how, lazy):
    done = run_to_its_end(FORK, disk_path / "store", lazy, how)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True, 0, True, [1, 2, 3]]
    assert "penstock:" not in done.stderr
    assert penstock.verify(disk_path / "store/step-0000000001").ok


def test_a_forked_childs_copy_of_an_attempt_removes_nothing(disk_path):
    """Also the copy that is dropped: files and directory are the parent's."""
    done = run_to_its_end(
        """
        import os, sys
        import numpy as np
        from penstock import _native, Options
        from penstock.state.flatten import flatten

        path = sys.argv[1]
        attempt = _native.Attempt.begin(path, overwrite=False)
        for stage in ("begun", "written"):
            if stage == "written":
                flat = flatten({"w": np.ones(1 << 20)})
                job = _native.Job(
                    path, flat.tensors, flat.aliases, flat.tree,
                    options=Options().to_native(), arena=None, lazy=True, nice=None,
                )
                vote = job.write(attempt, 0)["vote"]
            before = sorted(os.listdir(path))
            child = os.fork()
            if child == 0:
                del attempt
                os._exit(0)
            os.waitpid(child, 0)
            assert sorted(os.listdir(path)) == before, (stage, before)
        attempt.commit([(0, *vote)], step=None, metadata="{}", overwrite=False)
        """,
        disk_path / "ckpt",
    )
    assert done.returncode == 0, done.stderr
    assert penstock.verify(disk_path / "ckpt").ok


def test_what_ends_the_block_of_a_store_is_heard_with_the_save_that_failed(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    in_the_way(store, 1)

    def block():
        with store:
            store.save_async(1, {"w": 1})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        block()
    (note,) = caught.value.__notes__
    assert "failed" in note
    assert str(store.path(1)) in note


def test_a_store_stays_where_it_was_opened(disk_path, monkeypatch):
    monkeypatch.chdir(disk_path)
    store = penstock.CheckpointStore("store")
    with held(store, 1):
        pending = store.save_async(1, {"w": 1})
        (disk_path / "elsewhere").mkdir()
        monkeypatch.chdir(disk_path / "elsewhere")
    pending.result()
    assert penstock.load(disk_path / "store" / "step-0000000001") == {"w": 1}
