"""Weights streamed to a GPU are there when a kernel reads them, until it has finished."""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

import penstock
from gpu import GpuTensor, drawn, same
from penstock import offload
from penstock.errors import CorruptCheckpointError, DeviceError

ITEMS = 64 << 10

torch.set_num_threads(1)


class Layer(torch.nn.Module):
    """A block whose computation is a kernel that reads its weights, some time later."""

    def __init__(self, items):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(items), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.empty(7), requires_grad=False)

    def forward(self, looks):
        for parameter in (self.weight, self.bias):
            # Their offsets in the files are only multiples of 4.
            assert parameter.data_ptr() % 16 == 0, "kernels would be others"
            looks.append(parameter.gpu.look(parameter))
        return looks


class Stack(torch.nn.Module):
    def __init__(self, count, items=ITEMS):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Layer(items) for _ in range(count))

    def forward(self, looks, order=None):
        for index in range(len(self.blocks)) if order is None else order:
            looks = self.blocks[index](looks)
        return looks


def written(path, count, items=ITEMS, seed=0):
    """Writes weights to a file in the order of their blocks."""
    weights = {}
    for index in range(count):
        weights[f"blocks.{index}.weight"] = drawn((items,), torch.float32, seed + 2 * index)
        weights[f"blocks.{index}.bias"] = drawn((7,), torch.float32, seed + 2 * index + 1)
    path.mkdir(exist_ok=True)
    save_file(weights, path / "model.safetensors")
    return list(weights.values())


def least(path, count):
    with pytest.raises(ValueError, match="is the least that works") as caught:
        offload.stream(Stack(count), weights=path, memory_bytes=1, device="cuda")
    return int(re.findall(r"(\d+) is the least", str(caught.value))[0])


@torch.inference_mode()
def assert_sees(model, weights, order=None):
    looks = model([], order) if order is not None else model([])
    expected = weights
    if order is not None:
        expected = [one for index in order for one in weights[2 * index : 2 * index + 2]]
    assert len(looks) == len(expected)
    for look, weight in zip(looks, expected, strict=True):
        assert same(look(), weight)


@pytest.mark.parametrize("room", [1.0, 1.5, 3.0, 100.0])
def test_kernels_see_their_weights_whatever_the_order(gpu, disk_path, room):
    """From the least memory to that of all weights, in several passes, however late the kernels."""
    weights = written(disk_path / "a", 8)
    memory_bytes = int(least(disk_path / "a", 8) * room)
    for seed in range(3):
        gpu.draw(seed, 1500)
        model = offload.stream(
            Stack(8), weights=disk_path / "a", memory_bytes=memory_bytes, device="cuda"
        )
        for _ in range(4):
            assert_sees(model, weights)
        told = offload.report(model)
        assert (told.pass_bytes == 0) == (room == 100.0)
        assert told.resident_bytes + told.passing_bytes <= memory_bytes
        assert all(one.device.type == "cuda" for one in model.parameters())
        gpu.forget()


def test_blocks_in_any_order(gpu, disk_path):
    weights = written(disk_path / "a", 6)
    memory_bytes = int(least(disk_path / "a", 6) * 1.5)
    gpu.draw(5, 800)
    model = offload.stream(
        Stack(6), weights=disk_path / "a", memory_bytes=memory_bytes, device="cuda:0"
    )
    generator = torch.Generator().manual_seed(2)
    for _ in range(15):
        assert_sees(model, weights, torch.randint(6, (5,), generator=generator).tolist())


def test_streams_that_take_turns(gpu, disk_path):
    """Memory is not refilled for one stream while another stream's kernels read it."""
    weights = written(disk_path / "a", 6)
    memory_bytes = int(least(disk_path / "a", 6) * 1.5)
    for seed in range(6):
        gpu.draw(seed, 2500)
        model = offload.stream(
            Stack(6), weights=disk_path / "a", memory_bytes=memory_bytes, device="cuda"
        )
        take_turns(gpu, model, weights)
        del model
        gpu.forget()


def take_turns(gpu, model, weights):
    streams = [gpu.stream, gpu.new_stream(), gpu.new_stream()]
    looks = []
    with torch.inference_mode():
        for turn in range(18):
            gpu.stream = streams[turn % 3]
            # The read-ahead of the first block is dropped for the second one.
            model(looks, [turn % 6, (turn + 3) % 6])
    expected = [
        one
        for turn in range(18)
        for index in (turn % 6, (turn + 3) % 6)
        for one in weights[2 * index : 2 * index + 2]
    ]
    for look, weight in zip(looks, expected, strict=True):
        assert same(look(), weight)


def test_a_checkpoint_is_compared_with_its_digests(gpu, disk_path):
    weights = written(disk_path / "a", 6)
    names = [f"blocks.{index}.{name}" for index in range(6) for name in ("weight", "bias")]
    penstock.save(disk_path / "b", dict(zip(names, weights, strict=True)))
    memory_bytes = int(least(disk_path / "a", 6) * 2)
    gpu.draw(7, 500)
    model = offload.stream(
        Stack(6), weights=disk_path / "b", memory_bytes=memory_bytes, device="cuda"
    )
    for _ in range(3):
        assert_sees(model, weights)
    del model
    model = offload.stream(
        Stack(6), weights=disk_path / "b", memory_bytes=memory_bytes, device="cuda"
    )
    shards = sorted((disk_path / "b").glob("shard-*"))
    with open(shards[-1], "r+b") as file:
        file.seek(-ITEMS, 2)
        file.write(b"\xff\0damage\0\xff")
    with pytest.raises(CorruptCheckpointError):
        assert_sees(model, weights)


def test_buffers_go_there_and_the_model_says_where_it_is(gpu, disk_path, monkeypatch):
    written(disk_path / "a", 2)
    moved = []
    model = Stack(2)
    model.register_buffer("scale", torch.ones(3), persistent=False)
    to = torch.Tensor.to

    def noted(tensor, *where, **how):
        if tensor is model.scale:
            moved.append(where)
            return gpu.put(tensor)
        return to(tensor, *where, **how)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    model = offload.stream(model, weights=disk_path / "a", memory_bytes=1 << 30, device="cuda")
    assert moved == [(torch.device("cuda:0"),)]
    assert model.scale.device.type == "cuda"


def test_what_cannot_be_streamed_there_is_refused(gpu, disk_path):
    written(disk_path / "a", 2)
    with pytest.raises(ValueError, match="Budget"):
        offload.stream(
            Stack(2),
            weights=disk_path / "a",
            memory_bytes=offload.Budget(1 << 30),
            device="cuda",
        )
    for device in ("nowhere", "meta", 3.5):
        with pytest.raises(ValueError, match="device="):
            offload.stream(Stack(2), weights=disk_path / "a", memory_bytes=1 << 30, device=device)
    model = offload.stream(Stack(2), weights=disk_path / "a", memory_bytes=1 << 30, device="cpu")
    assert all(one.device.type == "cpu" for one in model.parameters())


def is_right(model, weights):
    with contextlib.suppress(DeviceError):
        assert_sees(model, weights)
        return True
    return False


@pytest.mark.parametrize("name", ["cuMemcpyBatchAsync_v2", "cuStreamWaitEvent", "cuEventRecord"])
def test_a_call_of_the_driver_that_fails_is_told_and_the_next_pass_is_right(gpu, disk_path, name):
    weights = written(disk_path / "a", 6)
    memory_bytes = int(least(disk_path / "a", 6) * 1.5)
    model = offload.stream(
        Stack(6), weights=disk_path / "a", memory_bytes=memory_bytes, device="cuda"
    )
    assert_sees(model, weights)
    told = 0
    for nth in range(1, 14):
        gpu.fail(name, nth)
        with contextlib.suppress(DeviceError):
            assert_sees(model, weights)
            told -= 1
        told += 1
        gpu.mend()
        # A failed read-ahead is raised by the call that needs it.
        assert any(is_right(model, weights) for _ in range(6))
        gpu.forget()
    assert told > 0


class Shown(Layer):
    """A block that signals that it is being called, and waits for permission to go on."""

    def forward(self, looks, inside=None, until=None, stream=None):
        looks = super().forward(looks)
        if inside is not None:
            inside.set()
            assert until.wait(60)
            # This thread's stream, whichever stream other threads have made current.
            self.weight.gpu.stream = stream
        return looks


def test_whoever_leaves_a_block_first_has_seen_its_weights(gpu, disk_path):
    """Two threads are in one block; the stream of the first to leave is late."""
    weights = written(disk_path / "a", 6)
    stack = Stack(6)
    stack.blocks = torch.nn.ModuleList(Shown(ITEMS) for _ in range(6))
    memory_bytes = least(disk_path / "a", 6)
    model = offload.stream(stack, weights=disk_path / "a", memory_bytes=memory_bytes, device="cuda")
    late, other = gpu.new_stream(), gpu.new_stream()
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    looks, ended = [], threading.Event()

    @torch.inference_mode()
    def first():
        gpu.call("cuCtxPushCurrent_v2", gpu._context)
        gpu.stream = late
        model.blocks[0](looks, first_in, second_in, late)
        first_out.set()

    @torch.inference_mode()
    def second():
        gpu.call("cuCtxPushCurrent_v2", gpu._context)
        assert first_in.wait(60)
        gpu.stream = other
        model.blocks[0]([], second_in, first_out, other)

    @torch.inference_mode()
    def others():
        gpu.call("cuCtxPushCurrent_v2", gpu._context)
        for index in range(1, 6):
            model.blocks[index]([])
        ended.set()

    with gpu.holding(late):
        threads = [threading.Thread(target=work) for work in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        thread = threading.Thread(target=others)
        thread.start()
        assert not ended.wait(0.3), "what it still reads is filled anew"
    thread.join()
    assert same(looks[0](), weights[0])


def test_weights_that_are_converted_are_so_for_every_stream(gpu, disk_path, monkeypatch):
    weights = {f"blocks.{index}.weight": drawn((ITEMS,), torch.float16, index) for index in (0, 1)}
    weights |= {f"blocks.{index}.bias": drawn((7,), torch.float16, index) for index in (0, 1)}
    save_file(weights, disk_path / "model.safetensors")

    def convert(tensor, source):
        # By a kernel on the stream, like PyTorch.
        gpu._write(tensor.data_ptr(), gpu.read(source).to(tensor.dtype).untyped_storage())
        return tensor

    model = offload.stream(Stack(2), weights=disk_path, memory_bytes=1 << 30, device="cuda")
    late, other = gpu.new_stream(), gpu.stream
    monkeypatch.setattr(gpu, "read", gpu.peek)
    monkeypatch.setattr(GpuTensor, "copy_", convert)
    with torch.inference_mode():
        with gpu.holding(late):
            gpu.stream = late
            looks = model([])
            gpu.stream = other
            looks += model([])
            time.sleep(0.1)
        for number, look in enumerate(looks):
            name = f"blocks.{number // 2 % 2}.{('weight', 'bias')[number % 2]}"
            assert same(look(), weights[name].float())


def test_a_block_is_not_captured_into_a_graph(gpu, disk_path):
    weights = written(disk_path / "a", 6)
    memory_bytes = least(disk_path / "a", 6)
    model = offload.stream(
        Stack(6), weights=disk_path / "a", memory_bytes=memory_bytes, device="cuda"
    )
    assert_sees(model, weights)
    with gpu.capturing(), torch.inference_mode(), pytest.raises(DeviceError, match="capt"):
        model.blocks[0]([])
    assert_sees(model, weights)


def test_a_block_that_stays_may_be_captured(gpu, disk_path, monkeypatch):
    weights = written(disk_path / "a", 6)
    model = offload.stream(Stack(6), weights=disk_path / "a", memory_bytes=1 << 28, device="cuda")
    with gpu.capturing(), torch.inference_mode(), pytest.raises(DeviceError, match="capt"):
        model([])
    assert_sees(model, weights)
    with gpu.capturing(), torch.inference_mode(), monkeypatch.context() as patched:
        # The kernels of these tests allocate memory, which fails during the capture.
        patched.setattr(gpu, "look", lambda tensor: tensor)
        held = model([])
    assert_sees(model, weights)
    assert [one.data_ptr() for one in held] == [one.data_ptr() for one in held_by(model)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_stays_may_be_captured_on_another_stream(gpu, disk_path, dtype, monkeypatch):
    """A weight is converted once, on any stream; `torch.cuda.graph` uses its own."""
    content = {f"blocks.{index}.weight": drawn((ITEMS,), dtype, index) for index in range(3)}
    content |= {f"blocks.{index}.bias": drawn((7,), dtype, 9) for index in range(3)}
    save_file(content, disk_path / "model.safetensors")
    model = offload.stream(Stack(3), weights=disk_path, memory_bytes=1 << 28, device="cuda")
    with torch.inference_mode():
        looks = model([])
    assert all(same(looks[2 * at](), content[f"blocks.{at}.weight"].float()) for at in range(3))
    first, gpu.stream = gpu.stream, gpu.new_stream()
    with gpu.capturing(), torch.inference_mode(), monkeypatch.context() as patched:
        patched.setattr(gpu, "look", lambda tensor: tensor)
        assert len(model([])) == 6
    gpu.stream = first


def test_uses_are_of_the_device_whichever_one_is_current(gpu, disk_path, monkeypatch):
    """The calling thread's current device may differ from the one of the stream."""
    gpu.driver.penstock_fake_devices(2)
    weights = written(disk_path / "a", 6)
    model = offload.stream(
        Stack(6),
        weights=disk_path / "a",
        memory_bytes=least(disk_path / "a", 6),
        device="cuda",
    )
    late, other = gpu.new_stream(), gpu.stream
    ended = threading.Event()

    @torch.inference_mode()
    def call_others():
        gpu.call("cuCtxPushCurrent_v2", gpu._context)
        model([], [4, 2, 3, 5])
        ended.set()

    with torch.inference_mode():
        model([], [0])
    with gpu.holding(late):
        gpu.stream = late
        with gpu.another_current(monkeypatch), torch.inference_mode():
            looks = model([], [1])
        gpu.stream = other
        thread = threading.Thread(target=call_others)
        thread.start()
        is_over = ended.wait(0.3)
    thread.join()
    assert not is_over, "what a kernel still reads is filled anew"
    assert all(same(look(), weight) for look, weight in zip(looks, weights[2:4], strict=True))


def test_the_default_stream_of_each_thread_is_refused(gpu, disk_path):
    """Other threads have another stream behind the same handle."""
    weights = written(disk_path / "a", 2)
    model = offload.stream(Stack(2), weights=disk_path / "a", memory_bytes=1 << 28, device="cuda")
    other, gpu.stream = gpu.stream, ctypes.c_void_p(2)
    with torch.inference_mode(), pytest.raises(DeviceError, match="of each thread"):
        model([])
    gpu.stream = other
    assert_sees(model, weights)


def held_by(model):
    """Returns the parameters that stay in memory."""
    return [one for block in model.blocks for one in (block.weight, block.bias)]


def test_what_stays_is_read_again_after_the_kernels_that_use_it(gpu, disk_path):
    """After a file has changed: earlier results were computed from the right values."""
    weights = written(disk_path / "a", 2)
    model = offload.stream(Stack(2), weights=disk_path / "a", memory_bytes=1 << 28, device="cuda")
    assert_sees(model, weights)
    late, other = gpu.new_stream(), gpu.stream
    ended = threading.Event()

    @torch.inference_mode()
    def call_again():
        gpu.call("cuCtxPushCurrent_v2", gpu._context)
        for _ in range(2):
            with contextlib.suppress(CorruptCheckpointError):
                model([])
        ended.set()

    with gpu.holding(late):
        gpu.stream = late
        with torch.inference_mode():
            looks = model([])
        gpu.stream = other
        written(disk_path / "a", 2, seed=100)
        thread = threading.Thread(target=call_again)
        thread.start()
        assert not ended.wait(0.3), "what it still reads is filled anew"
    thread.join()
    for look, weight in zip(looks, weights, strict=True):
        assert same(look(), weight)


def test_a_stream_that_was_used_before_may_be_captured(gpu, disk_path, monkeypatch):
    weights = written(disk_path / "a", 6)
    memory_bytes = least(disk_path / "a", 6)
    model = offload.stream(
        Stack(6), weights=disk_path / "a", memory_bytes=memory_bytes, device="cuda"
    )
    assert_sees(model, weights)
    first, other = gpu.stream, gpu.new_stream()
    with gpu.capturing(), monkeypatch.context() as patched:
        # The kernels of these tests allocate memory, which fails during the capture.
        patched.setattr(gpu, "look", lambda tensor: None)
        gpu.stream = other
        try:
            with torch.inference_mode():
                model([])
        finally:
            gpu.stream = first
    assert_sees(model, weights)


def test_buffers_that_modules_share_are_moved_once(gpu, disk_path):
    written(disk_path / "a", 3)
    stack = Stack(3)
    table = torch.arange(100.0)
    for block in stack.blocks:
        block.register_buffer("table", table, persistent=False)
    model = offload.stream(stack, weights=disk_path / "a", memory_bytes=1 << 30, device="cuda")
    assert len({id(block.table) for block in model.blocks}) == 1
    assert same(gpu.read(model.blocks[0].table), table)
