"""Optimizers with state in files update a GPU's parameters: bit for bit, in stream order."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import penstock
from gpu import same
from offload.optim.training_of import MEMORY_BYTES, assert_equal_states, parameters
from penstock import offload
from penstock.errors import DeviceError, UnsupportedStateError
from penstock.tensors import devices

torch.set_num_threads(1)

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Pair:
    """The same training twice: PyTorch's optimizer on the host, and Penstock's on a GPU."""

    def __init__(self, gpu, directory, dtype=torch.float32, make=None, *, on_gpu=lambda _: True):
        self.gpu = gpu
        self.theirs = parameters(dtype)
        self.ours = [
            torch.nn.Parameter(gpu.put(one.detach()) if on_gpu(at) else one.detach().clone())
            for at, one in enumerate(self.theirs)
        ]
        make = make or (lambda module, some, **more: module.AdamW(some, lr=1e-2, **more))
        self.one = make(torch.optim, self.theirs, fused=True)
        # Near the minimum: as many windows as possible.
        self.other = make(offload, self.ours, directory=directory, memory_bytes=20 << 20)

    def set_gradients(self, step, *, without=lambda _: False, scale=1.0):
        """Gradients of the GPU are computed by a kernel, some time later."""
        generator = torch.Generator().manual_seed(1000 + step)
        for at, (their, our) in enumerate(zip(self.theirs, self.ours, strict=True)):
            gradient = torch.randn(their.shape, generator=generator).to(their.dtype) * scale
            their.grad = None if without(at) else gradient
            is_on_gpu = our.device.type == "cuda"
            copy = self.gpu.put(gradient) if is_on_gpu else gradient.clone()
            our.grad = None if without(at) else copy

    def step(self):
        self.one.step()
        self.other.step()

    def assert_equal(self):
        """Compares by a kernel that is queued behind the step."""
        looks = [
            self.gpu.look(one) if one.device.type == "cuda" and one.numel() else None
            for one in self.ours
        ]
        for their, our, look in zip(self.theirs, self.ours, looks, strict=True):
            found = look() if look else our.detach() if our.is_cpu else self.gpu.read(our.detach())
            assert same(their.detach(), found)
        assert_equal_states(self.one.state_dict(), self.other.state_dict())


@pytest.fixture
def pair(gpu, tmp_path):
    with contextlib.ExitStack() as stack:

        def make(*arguments, **keywords):
            made = Pair(gpu, tmp_path / "state", *arguments, **keywords)
            stack.callback(made.other.close)
            return made

        yield make


def sgd(module, some, **more):
    return module.SGD(some, lr=1e-2, momentum=0.9, nesterov=True, **more)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_are_those_of_the_host_however_late_the_gpu_is(gpu, pair, dtype, seed):
    gpu.draw(seed, 3000)
    both = pair(dtype)
    for step in range(3):
        both.set_gradients(step, without=lambda at, step=step: at == 8 or at == 4 > step)
        both.step()
        both.assert_equal()


def test_sgd(gpu, pair):
    gpu.draw(4, 3000)
    both = pair(make=sgd)
    for step in range(3):
        both.set_gradients(step)
        both.step()
    both.assert_equal()


def test_parameters_of_both_the_host_and_the_gpu(gpu, pair):
    gpu.draw(5, 3000)
    both = pair(on_gpu=lambda at: at % 2)
    for step in range(2):
        both.set_gradients(step)
        both.step()
    both.assert_equal()


@pytest.mark.parametrize("seed", [1, 2])
def test_masters_and_what_recovers_by_them(gpu, tmp_path, seed):
    gpu.draw(seed, 3000)
    host = parameters(torch.bfloat16)
    ours = [torch.nn.Parameter(gpu.put(one.detach())) for one in host]
    options = {"lr": 1e-2, "memory_bytes": MEMORY_BYTES, "masters": True}
    one = offload.AdamW(host, directory=tmp_path / "host", **options)
    other = offload.AdamW(ours, directory=tmp_path / "gpu", **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for their, our in zip(host, ours, strict=True):
            their.grad = torch.randn(their.shape, generator=generator).to(their.dtype)
            our.grad = gpu.put(their.grad)
        one.step()
        other.step()
    assert_equal_states(one.state_dict(), other.state_dict())
    for their, our in zip(host, ours, strict=True):
        assert same(their.detach(), gpu.read(our.detach()))
    other.close()
    fresh = [torch.nn.Parameter(gpu.put(torch.zeros_like(their))) for their in host]
    again = offload.AdamW(fresh, directory=tmp_path / "gpu", **options)
    assert again.recover()
    for their, our in zip(host, fresh, strict=True):
        assert same(their.detach(), gpu.read(our.detach()))
    for optimizer in (one, again):
        optimizer.close()


def test_a_scale_that_the_gpu_has(gpu, pair):
    both = pair()
    both.set_gradients(0, scale=1024.0)
    both.one.grad_scale, both.other.grad_scale = torch.tensor(1024.0), gpu.put(torch.tensor(1024.0))
    both.step()
    both.assert_equal()


def test_many_small_parameters_are_few_copies(gpu, pair, monkeypatch):
    both = pair()
    both.set_gradients(0)
    copies = []
    for name in ("bring", "fetch"):
        copy = getattr(gpu, name)
        counted = functools.partial(lambda copy, *both: copies.append(both) or copy(*both), copy)
        monkeypatch.setattr(gpu, name, counted)
    both.other.step()
    # For each window the gradients, the values, and the new values on their way back: 4 windows, of
    # 9 parameters and the parts they are cut into.
    assert len(copies) <= 3 * 4
    both.one.step()
    both.assert_equal()


@pytest.mark.parametrize("make", [None, sgd])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_rate_that_the_gpu_has(gpu, pair, make, seed):
    """PyTorch's own optimizers would read the rate before it has arrived."""
    gpu.draw(seed, 3000)
    both = pair(make=make)
    for step in range(2):
        rate = torch.tensor(0.01 * (step + 1))
        both.one.param_groups[0]["lr"] = rate
        both.other.param_groups[0]["lr"] = gpu.put(rate)
        both.set_gradients(step)
        both.step()
    both.assert_equal()


def test_a_gpu_without_memory_to_pack_in(gpu, pair, monkeypatch):
    both = pair()
    both.set_gradients(0)
    refused = []

    def refuse(*sizes):
        refused.append(sizes)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "empty", refuse)
    both.step()
    both.assert_equal()
    assert refused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_under_autocast(gpu, pair, dtype):
    both = pair(torch.bfloat16)
    both.set_gradients(0)
    both.one.step()
    # CPU autocast changes the same operations as CUDA's.
    with torch.autocast("cpu", dtype=dtype):
        both.other.step()
    both.assert_equal()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_lazy_save_has_what_was_there(gpu, pair, tmp_path, is_guarded, seed):
    """The save is running when the step changes the parameters."""
    gpu.draw(seed, 3000)
    both = pair()
    both.set_gradients(0)
    both.step()
    if is_guarded:
        penstock.guard(both.other)
    kept = [gpu.read(one.detach()) for one in both.ours]
    model = {str(number): one for number, one in enumerate(both.ours)}
    with penstock.CheckpointStore(tmp_path / "store") as store:
        state = {"model": model, "optimizer": both.other.state_dict()}
        both.set_gradients(1)
        pending = store.save_async(1, state, lazy=True)
        both.step()
        pending.result()
        both.assert_equal()
        found = store.load(1)["model"]
    assert all(same(found[str(number)], one) for number, one in enumerate(kept))


@pytest.mark.parametrize("is_found", [0.0, 1.0])
def test_what_a_scaler_found_on_the_gpu(gpu, pair, is_found):
    both = pair()
    both.set_gradients(0)
    both.one.found_inf = torch.tensor(is_found)
    both.other.found_inf = gpu.put(torch.tensor(is_found))
    with gpu.capturing(), pytest.raises(DeviceError, match="captur"):
        both.other.step()
    before = [gpu.read(one.detach()) for one in both.ours]
    both.step()
    after = [gpu.read(one.detach()) for one in both.ours]
    assert all(map(same, before, after)) == bool(is_found)
    if not is_found:
        both.assert_equal()


def test_a_checkpoint_has_both_and_is_loaded_into_both(gpu, pair, tmp_path):
    both = pair()
    both.set_gradients(0)
    both.step()
    penstock.save(
        tmp_path / "checkpoint",
        {"model": dict(enumerate(both.ours)), "optimizer": both.other.state_dict()},
    )
    both.set_gradients(1)
    both.step()
    kept = [gpu.read(one.detach()) for one in both.ours]
    state = {"model": dict(enumerate(both.ours)), "optimizer": both.other.state_dict()}
    loaded = penstock.load(tmp_path / "checkpoint", into=state)
    both.other.load_state_dict(loaded["optimizer"])
    both.set_gradients(1)
    both.other.step()
    both.assert_equal()
    for one, before in zip(both.ours, kept, strict=True):
        assert same(gpu.read(one.detach()), before)


def test_counts_of_a_state_never_go_to_the_gpu(gpu, pair, monkeypatch):
    """It may have no memory left in the middle of the load."""
    both = pair()
    both.set_gradients(0)
    both.step()
    state = both.other.state_dict()
    monkeypatch.setattr(gpu, "put", lambda _: pytest.fail("something goes to the GPU"))
    both.other.load_state_dict(state)
    monkeypatch.undo()
    assert both.other.param_groups[0]["fused"] is True
    assert both.other.param_groups[0]["capturable"] is False
    assert all(one["step"].is_cpu for one in both.other.state.values())
    both.set_gradients(1)
    both.step()
    both.assert_equal()


def test_a_state_of_pytorch_s_whose_moments_the_gpu_has(gpu, pair):
    both = pair()
    both.set_gradients(0)
    both.one.step()
    state = both.one.state_dict()
    for number, one in state["state"].items():
        moved = {name: gpu.put(value) for name, value in one.items() if name != "step"}
        state["state"][number] = {**one, **moved}
    for our, their in zip(both.ours, both.theirs, strict=True):
        our.detach().copy_(gpu.put(their.detach()))
    both.other.load_state_dict(state)
    both.set_gradients(1)
    both.step()
    both.assert_equal()


def test_a_step_under_capture_is_refused_and_changes_nothing(gpu, pair):
    both = pair()
    both.set_gradients(0)
    with gpu.capturing(), pytest.raises(DeviceError, match="captur"):
        both.other.step()
    both.step()
    both.assert_equal()


def test_a_step_in_a_fork_is_refused(gpu, pair, monkeypatch):
    both = pair()
    both.set_gradients(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        with pytest.raises(DeviceError, match="forked"):
            both.other.step()
    both.step()
    both.assert_equal()


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventSynchronize"])
def test_a_driver_that_fails_before_anything_has_changed(gpu, pair, call):
    both = pair()
    both.set_gradients(0)
    gpu.fail(call)
    with pytest.raises(DeviceError):
        both.other.step()
    gpu.mend()
    both.step()
    both.assert_equal()


def test_a_driver_that_fails_in_the_middle_is_told_of_until_a_state_is_loaded(gpu, pair, tmp_path):
    both = pair()
    both.set_gradients(0)
    both.step()
    state = both.other.state_dict()
    penstock.save(tmp_path / "checkpoint", {"model": dict(enumerate(both.ours)), "state": state})
    both.set_gradients(1)
    gpu.fail("cuEventSynchronize", nth=2)
    with pytest.raises(DeviceError):
        both.other.step()
    gpu.mend()
    with pytest.raises(penstock.PenstockError, match="in its middle"):
        both.other.step()
    model = {"model": dict(enumerate(both.ours))}
    penstock.load(tmp_path / "checkpoint", into=model, keys="model.*")
    both.other.load_state_dict(state)
    both.set_gradients(1)
    both.step()
    both.assert_equal()


def test_memory_that_cannot_be_pinned_is_slower_only(gpu, pair, monkeypatch):
    both = pair()
    both.set_gradients(0)
    refused = []

    def refuse(sizes, dtype):
        refused.append(sizes)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(gpu, "pinned", refuse)
    both.step()
    both.assert_equal()
    assert refused


def test_a_device_without_a_driver_is_copied_by_pytorch(gpu, pair, monkeypatch):
    monkeypatch.setattr(devices, "is_direct", lambda: False)
    both = pair()
    for step in range(2):
        both.set_gradients(step)
        both.step()
    both.assert_equal()


def test_parameters_without_values_are_refused(tmp_path):
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(UnsupportedStateError, match="meta"):
        offload.AdamW([parameter], directory=tmp_path)
