"""Lazy saves: the state is copied during training, and every change of it is noticed."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import penstock
from background import held
from compare import assert_same
from penstock.errors import StateMismatchError

MIB = 1 << 20


torch.set_num_threads(1)


def lazy_state():
    return {"w": torch.arange(2 * MIB, dtype=torch.float32), "b": torch.arange(10.0)}


@pytest.mark.quick
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
        with pytest.raises(ValueError, match="nan"):
            pending.wait_staged(float("nan"))
        release()
        assert pending.wait_staged()
        state["w"].zero_()
    pending.result()
    assert_same(store.load(1), lazy_state())


@pytest.mark.quick
@pytest.mark.parametrize("name", ["w", "view"])
def test_a_change_before_the_copy_fails_the_save_and_leaves_no_checkpoint(disk_path, name):
    store = penstock.CheckpointStore(disk_path / "store")
    state = lazy_state()
    state["view"] = state["w"][:100_000]
    with held(store, 1):
        pending = store.save_async(1, state, lazy=True)
        state[name].add_(1)
    with pytest.raises(StateMismatchError, match=r'"w" changed .*guard') as caught:
        pending.result()
    assert caught.value.path == pending.path
    assert pending.wait_staged(0)
    assert store.steps() == []
    assert os.listdir(pending.path) == []
    store.save(2, state)
    assert store.steps() == [2]


@pytest.mark.quick
def test_a_thread_that_changes_everything_once_all_is_staged_tears_nothing(disk_path):
    """It changes the state from the moment that `stage` returns, during the write."""
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
    """64 MiB of them are copied: a change of the rest is noticed."""
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
    assert isinstance(pending.exception(), StateMismatchError)


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
        # The freed memory would soon be allocated by others.
        others = [torch.full((3 * MIB,), 7.0) for _ in range(4)]
    if pending.exception() is None:
        assert_same(store.load(1), {"w": torch.zeros(3 * MIB)})
    else:
        assert isinstance(pending.exception(), StateMismatchError)
    assert len(others) == 4


def tied_states():
    """Yields a name, a state, the object to change (or its key), and the expected stored value."""
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
    """The change is noticed, or the memory was copied at the call if changes are not counted."""
    _, state, changed, expected = case
    store = penstock.CheckpointStore(disk_path / "store")
    with held(store, 1), torch.no_grad():
        pending = store.save_async(1, state, lazy=True)
        target = state[changed] if isinstance(changed, str) else changed
        target += 1
    if expected is None:
        with pytest.raises(StateMismatchError, match="changed"):
            pending.result()
    else:
        pending.result()
        assert not any(value.any() for value in store.load(1).values())


def test_running_statistics_are_copied_at_the_call(disk_path):
    """Changes in a forward are not counted; they are small, and the smallest are copied first."""
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


@pytest.mark.parametrize("is_local", [False, True], ids=["whole", "local"])
def test_a_change_of_a_dtensor_fails_a_lazy_save(disk_path, lone_job, is_local):
    store = penstock.CheckpointStore(disk_path / "store")
    tensor = distribute_tensor(torch.ones(2 * MIB), init_device_mesh("cpu", (1,)), [Shard(0)])
    with held(store, 1) as release:
        pending = store.save_async(1, {"w": tensor}, lazy=True)
        (tensor.to_local() if is_local else tensor).add_(1)
        release()
    with pytest.raises(StateMismatchError, match="changed"):
        pending.result()
    assert store.steps() == []


def test_a_lazy_state_is_held_until_it_is_staged_and_no_longer(disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    gc.collect()
    gc.disable()
    try:
        with held(store, 1):
            # The tensor shares the array's memory.
            below = np.ones(MIB, np.float32)
            state = {"t": torch.from_numpy(below), "a": np.ones(MIB)}
            memory, array = weakref.ref(below), weakref.ref(state["a"])
            pending = store.save_async(1, state, lazy=True)
            del state, below
            assert memory() is not None
            # The array is copied.
            assert array() is None
            pending.stage()
            assert memory() is None
        pending.result()
        assert_same(store.load(1), {"t": torch.ones(MIB), "a": np.ones(MIB)})
    finally:
        gc.enable()
