"""Tensors of a GPU are stored with their values at the call, whatever the GPU does later."""

from __future__ import annotations

import time

import pytest
import torch

import penstock
from background import run_to_its_end
from gpu import DRIVER, DTYPES, VARIABLE, drawn, layouts, same
from penstock.errors import DeviceError, StateMismatchError
from penstock.tensors.devices import is_scattered
from penstock.tensors.memory import of_tensor

MIB = 1 << 20

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_comes_back(gpu, disk_path, dtype):
    gpu.draw(3, 200)
    hosts = layouts(dtype)
    state = {
        name: gpu.put(host.clone() if name == "scalar" else host) for name, host in hosts.items()
    }
    report = penstock.save(disk_path / "a", {"on": state, "beside": hosts["rows"], "n": 3})
    loaded = penstock.load(disk_path / "a")
    for name, host in hosts.items():
        assert same(loaded["on"][name], host), name
    assert same(loaded["beside"], hosts["rows"])
    # PyTorch copies scattered tensors.
    together = [host for host in hosts.values() if not is_scattered(of_tensor(host, "host"))]
    assert report.device_bytes == sum(host.numel() * host.element_size() for host in together)
    assert any(host is hosts["long rows"] for host in together)
    assert "from GPUs" in str(report)
    assert penstock.verify(disk_path / "a").ok


def test_tensors_that_share_memory_are_stored_once(gpu, disk_path):
    host = torch.arange(3000.0).reshape(30, 100)
    whole = gpu.put(host)
    part = type(whole)(gpu, whole.storage_address, host[10:20])
    report = penstock.save(disk_path / "a", {"whole": whole, "again": whole, "part": part})
    assert report.tensors == 1
    loaded = penstock.load(disk_path / "a")
    assert torch.equal(loaded["part"], host[10:20])
    loaded["whole"].zero_()
    assert not loaded["part"].any()
    assert loaded["again"] is loaded["whole"]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_training_that_goes_on_tears_nothing(gpu, disk_path, lazy):
    """Steps of an optimizer are queued behind unfinished copies."""
    store = penstock.CheckpointStore(disk_path / "store")
    host = torch.nn.Parameter(torch.zeros(1))
    host.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([host])
    penstock.guard(optimizer)
    sizes = [3 * MIB // 4 + 5, 100, 70_000, 2 * MIB // 4]
    for seed in range(20):
        gpu.draw(seed, 150)
        before = [drawn((size,), torch.float32, seed) for size in sizes]
        state = [gpu.put(tensor) for tensor in before]
        pending = store.save_async(seed, {"w": state}, lazy=lazy)
        optimizer.step()
        for tensor in state:
            gpu.change(tensor, drawn(tensor.shape, torch.float32, seed + 1000))
        pending.result()
        for tensor, expected in zip(store.load(seed)["w"], before, strict=True):
            assert same(tensor, expected)
        gpu.forget()
    assert store.steps() == list(range(20))


def test_a_change_that_nobody_held_up_fails_the_save(gpu, disk_path):
    store = penstock.CheckpointStore(
        disk_path / "store", options=penstock.Options(staging_bytes=4 * MIB)
    )
    store.save(0, {"w": 0})
    host = drawn((8 * MIB,), torch.float32)
    tensor = gpu.put(host)
    pending = store.save_async(1, {"w": tensor}, lazy=True)
    gpu.change(tensor, host)
    error = pending.exception()
    # The copy may have been faster.
    if error is not None:
        assert isinstance(error, StateMismatchError)
        assert error.key == "w"
        assert "pending.stage()" in str(error)
        assert store.steps() == [0]
    pending = store.save_async(2, {"w": tensor}, lazy=True)
    assert pending.wait_staged()
    gpu.change(tensor, torch.zeros_like(host))
    pending.result()
    assert same(store.load(2)["w"], host)


def test_small_tensors_may_change_after_the_call(gpu, disk_path):
    store = penstock.CheckpointStore(disk_path / "store")
    gpu.draw(5, 300)
    mean = drawn((100,), torch.float32)
    state = {"mean": gpu.put(mean), "w": gpu.put(drawn((MIB,), torch.float32))}
    pending = store.save_async(1, state, lazy=True)
    gpu.change(state["mean"], torch.zeros(100))
    pending.result()
    assert same(store.load(1)["mean"], mean)


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("is_copied", [False, True])
def test_an_optimizer_without_a_guard_waits_too(gpu, disk_path, is_counted, is_copied):
    """PyTorch does not count the changes of fused optimizers; others change copied tensors too."""
    store = penstock.CheckpointStore(
        disk_path / "store", options=penstock.Options(staging_bytes=4 * MIB)
    )
    host = torch.nn.Parameter(torch.zeros(1))
    host.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([host])
    for seed in range(10):
        gpu.draw(seed, 150)
        before = drawn((2 * MIB,), torch.float32, seed)
        tensor = gpu.put(before)
        pending = store.save_async(seed, {"w": tensor}, lazy=True)
        while is_copied and pending._job.is_on_device:
            time.sleep(0.0005)
        optimizer.step()
        gpu.change(tensor, torch.zeros(2 * MIB), is_counted=is_counted)
        pending.result()
        assert same(store.load(seed)["w"], before)
        gpu.forget()


def test_a_load_into_what_is_being_saved_comes_after_the_copy(gpu, disk_path):
    store = penstock.CheckpointStore(
        disk_path / "store", options=penstock.Options(staging_bytes=4 * MIB)
    )
    penstock.save(disk_path / "other", {"w": torch.ones(2 * MIB)})
    for seed in range(10):
        gpu.draw(seed, 150)
        before = drawn((2 * MIB,), torch.float32, seed)
        tensor = gpu.put(before)
        pending = store.save_async(seed, {"w": tensor}, lazy=True)
        penstock.load(disk_path / "other", into={"w": tensor})
        pending.result()
        assert same(store.load(seed)["w"], before)
        assert same(gpu.read(tensor), torch.ones(2 * MIB))
        gpu.forget()


def test_memory_is_pinned_once(gpu, disk_path):
    state = {"w": gpu.put(drawn((5 * MIB,), torch.float32))}
    store = penstock.CheckpointStore(disk_path / "store")
    pinned = []
    for step in range(4):
        penstock.save(disk_path / f"{step}", state)
        store.save_async(step, state).result()
        pinned.append(gpu.calls("cuMemHostRegister_v2"))
    assert len(set(pinned)) == 1 or len(set(pinned[1:])) == 1


def test_where_no_more_may_be_pinned_the_report_says_so(gpu, disk_path):
    gpu.driver.penstock_fake_pinned_bytes_max(0)
    try:
        host = drawn((MIB,), torch.float32)
        store = penstock.CheckpointStore(disk_path / "store")
        report = store.save_async(1, {"w": gpu.put_pageable(host)}).result()
    finally:
        gpu.driver.penstock_fake_pinned_bytes_max(-1)
    assert [fallback.kind for fallback in report.fallbacks] == ["unpinned"]
    assert same(store.load(1)["w"], host)


def test_a_save_inside_of_a_capture_is_refused(gpu, disk_path):
    state = {"w": gpu.put(drawn((MIB,), torch.float32))}
    store = penstock.CheckpointStore(disk_path / "store")
    gpu.forget()
    with gpu.capturing():
        for save in (
            lambda: penstock.save(disk_path / "a", state),
            lambda: store.save_async(1, state),
            lambda: store.save_async(1, state, lazy=True),
        ):
            with pytest.raises(DeviceError, match="outside of the capture") as caught:
                save()
            assert caught.value.code is None
    assert not (disk_path / "a").exists()
    assert store.steps() == []
    store.save(1, state)


def test_a_fork_saves_what_the_host_has_and_refuses_the_rest(disk_path):
    script = """
        import os, sys, torch
        sys.path.insert(0, sys.argv[2])
        import penstock
        from gpu import taken_for_real
        # Threads of OpenMP do not live on in a fork.
        torch.set_num_threads(1)
        with taken_for_real() as gpu:
            store = penstock.CheckpointStore(sys.argv[1])
            tensor = gpu.put(torch.ones(1 << 20))
            store.save_async(1, {"w": tensor}).result()
            child = os.fork()
            if child == 0:
                try:
                    store.save_async(2, {"w": torch.ones(1 << 20)}).result()
                    penstock.save(sys.argv[1] + "/of-child", {"w": torch.ones(1 << 20)})
                    for save in (store.save, store.save_async):
                        try:
                            save(3, {"w": tensor})
                        except penstock.errors.DeviceError as error:
                            assert "fork" in str(error) and "spawn" in str(error), error
                        else:
                            os._exit(7)
                    os._exit(0)
                except BaseException as error:
                    print(repr(error), flush=True)
                    os._exit(8)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
            store.save_async(4, {"w": tensor}).result()
            assert store.steps() == [1, 2, 4]
    """
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")
    here = DRIVER.parents[2] / "tests/python"
    ended = run_to_its_end(script, disk_path / "store", here, **{VARIABLE: str(DRIVER)})
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_without_a_driver_pytorch_copies(disk_path):
    script = """
        import os, sys, torch
        sys.path.insert(0, sys.argv[2])
        import penstock
        from gpu import taken_for_real
        with taken_for_real() as gpu:
            host = torch.arange(1000.0)
            report = penstock.save(sys.argv[1], {"w": gpu.put(host)})
            assert report.device_bytes == 0
            assert torch.equal(penstock.load(sys.argv[1])["w"], host)
    """
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")
    here = DRIVER.parents[2] / "tests/python"
    ended = run_to_its_end(script, disk_path / "a", here, **{VARIABLE: "/nowhere/libcuda.so.1"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
