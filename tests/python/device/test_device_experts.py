"""Experts streamed to a GPU: only the chosen ones are read, and kernels see the stored values."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import penstock
from gpu import GpuTensor, drawn, have_gpu, same
from penstock import offload
from penstock.errors import CorruptCheckpointError, DeviceError
from penstock.offload.streaming.weights.weight_files import WeightFiles

LAYERS = 3
COUNT = 8
COLUMNS = 256
ROWS = {"gate_up_proj": 64, "down_proj": 32}
MATRIX_BYTES = {name: rows * COLUMNS * 4 for name, rows in ROWS.items()}
SLOT_BYTES = sum(MATRIX_BYTES.values())

torch.set_num_threads(1)


class Experts(torch.nn.Module):
    """A mixture called like those of transformers, whose kernels read the matrices later.

    With ``eager`` the experts run one after the other, otherwise in any order.
    """

    has_gate = True
    is_transposed = False

    def __init__(self, layer, how):
        super().__init__()
        self.layer = layer
        self.num_experts = COUNT
        self.config = SimpleNamespace(_experts_implementation=how)
        for name, rows in ROWS.items():
            parameter = torch.nn.Parameter(torch.empty(COUNT, rows, COLUMNS), requires_grad=False)
            setattr(self, name, parameter)

    def forward(self, looks, index, then):
        for name in ROWS:
            if self.config._experts_implementation == "eager":
                for at in index.unique():
                    look(looks, (self.layer, name, int(at)), getattr(self, name)[at])
                    then()
            else:
                self._multiply(looks, name, index, then)

    def _multiply(self, looks, name, index, then):
        """Queues grouped products of rows; each row holds the number of its expert."""
        rows = index.sort().values.float().unsqueeze(1).expand(-1, COLUMNS)
        ends = torch.tensor([int((index <= at).sum()) for at in range(COUNT)]).int()
        gpu, product = have_gpu(), torch.ops.aten._grouped_mm.default

        def compute(func, args, kwargs):
            if func is not product:
                return args[0].alias(func(args[0]._like(), *args[1:], **kwargs))
            inputs, matrices, offs = args[:3]
            assert offs.tolist() == [len(inputs)]
            look(looks, (self.layer, name, int(inputs[0, 0])), matrices[0].t())
            then()
            return inputs.new_zeros(len(inputs), matrices.shape[-1])

        gpu.compute = compute
        try:
            matrices = getattr(self, name).transpose(-2, -1)
            torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
        finally:
            gpu.compute = None


def look(looks, what, matrix):
    if type(matrix) is GpuTensor:
        assert matrix.is_contiguous()
        assert matrix.data_ptr() % 16 == 0, "kernels take no other"
        looks.append((what, matrix.gpu.look(matrix)))
    else:
        kept = matrix.clone()
        looks.append((what, lambda: kept))


class Block(torch.nn.Module):
    def __init__(self, layer, how):
        super().__init__()
        self.experts = Experts(layer, how)
        self.bias = torch.nn.Parameter(torch.empty(7), requires_grad=False)

    def forward(self, looks, index, then=lambda: None):
        """Reads each matrix by a kernel, and calls `then` after each."""
        look(looks, (self.experts.layer, "bias", None), self.bias)
        self.experts(looks, index, then)


class Stack(torch.nn.Module):
    def __init__(self, how="eager"):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(layer, how) for layer in range(LAYERS))

    def forward(self, looks, choices):
        for block, chosen in zip(self.blocks, choices, strict=True):
            block(looks, torch.tensor(chosen))
        return looks


def written(path, dtype=torch.float32, seed=0):
    """Writes weights; returns them, and the expected values by layer, parameter, expert."""
    weights = {}
    for layer in range(LAYERS):
        for at, (name, rows) in enumerate(ROWS.items()):
            whole = drawn((COUNT, rows, COLUMNS), dtype, seed + 10 * layer + at)
            weights[f"blocks.{layer}.experts.{name}"] = whole
        weights[f"blocks.{layer}.bias"] = drawn((7,), dtype, seed + 10 * layer + 5)
    path.mkdir(exist_ok=True)
    save_file(weights, path / "model.safetensors")
    expected = {}
    for layer in range(LAYERS):
        expected[layer, "bias", None] = weights[f"blocks.{layer}.bias"].float()
        for name in ROWS:
            for at, matrix in enumerate(weights[f"blocks.{layer}.experts.{name}"]):
                expected[layer, name, at] = matrix.float()
    return weights, expected


def least(path, device="cuda"):
    with pytest.raises(ValueError, match="is the least that works") as caught:
        offload.stream(Stack(), weights=path, memory_bytes=1, device=device)
    return int(re.findall(r"(\d+) is the least", str(caught.value))[0])


def streamed(path, slots, how="eager", device="cuda"):
    """Streams a model with memory for so many experts, beside its other needs."""
    memory_bytes = least(path, device) + (slots - 2) * SLOT_BYTES + LAYERS * 4096
    if device == "cpu":
        # On the host, whole pages around the experts are read.
        memory_bytes += slots * len(ROWS) * 4096
    return offload.stream(Stack(how), weights=path, memory_bytes=memory_bytes, device=device)


def drawn_choices(generator, most=5):
    """Draws experts for each layer, some of them for several tokens."""
    sizes = torch.randint(1, most + 1, (LAYERS,), generator=generator).tolist()
    return [torch.randint(COUNT, (size,), generator=generator).tolist() for size in sizes]


def wanted(choices):
    """Returns the matrices that kernels should read in each layer, in any order."""
    found = []
    for layer, chosen in enumerate(choices):
        found.append((layer, "bias", None))
        found += [(layer, name, at) for name in ROWS for at in set(chosen)]
    return found


def assert_seen(looks, expected):
    for what, seen in looks:
        assert same(seen(), expected[what]), what


@torch.inference_mode()
def assert_sees(model, expected, choices):
    looks = model([], choices)
    assert sorted(map(str, (what for what, _ in looks))) == sorted(map(str, wanted(choices)))
    assert_seen(looks, expected)


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
@pytest.mark.parametrize("slots", [2, 5, 100])
def test_kernels_see_the_experts_that_were_chosen(gpu, disk_path, slots, how):
    """From the least memory to that of all experts, however late the kernels are."""
    _, expected = written(disk_path / "a")
    for seed in range(2):
        gpu.draw(seed, 800)
        gc.collect()
        taken = gpu.fresh.nbytes
        model = streamed(disk_path / "a", slots, how)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(6):
            assert_sees(model, expected, drawn_choices(generator))
        told = offload.report(model)
        memory_bytes = told.resident_bytes + told.passing_bytes + told.experts.memory_bytes
        assert gpu.fresh.nbytes - taken == memory_bytes
        assert told.experts.memory_bytes == min(slots, LAYERS * COUNT) * SLOT_BYTES
        assert all(one.device.type == "cuda" for one in model.parameters())
        gpu.forget()


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_streams_that_take_turns(gpu, disk_path, how):
    """Memory is not refilled for one stream while another stream's kernels read it."""
    _, expected = written(disk_path / "a")
    for seed in range(4):
        gpu.draw(seed, 2000)
        model = streamed(disk_path / "a", 3, how)
        streams = [gpu.stream, gpu.new_stream(), gpu.new_stream()]
        generator = torch.Generator().manual_seed(seed)
        looks = []
        with torch.inference_mode():
            for turn in range(12):
                gpu.stream = streams[turn % 3]
                model(looks, drawn_choices(generator))
        assert_seen(looks, expected)
        gpu.forget()


def on_another_thread(gpu, work):
    """Starts work on another thread; returns the thread and an event for its end."""
    ended = threading.Event()

    def run():
        gpu.call("cuCtxPushCurrent_v2", gpu._context)
        with torch.inference_mode():
            work()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
@pytest.mark.parametrize("is_broken_off", [False, True])
def test_what_a_late_stream_reads_is_not_filled(gpu, disk_path, how, is_broken_off):
    """Whether the late stream's call returned or was interrupted."""
    _, expected = written(disk_path / "a")
    model = streamed(disk_path / "a", 2, how)
    late, other = gpu.new_stream(), gpu.stream
    looks, ours = [], []

    def break_off():
        raise KeyboardInterrupt

    def go_on():
        pass

    chosen = torch.tensor([3, 5])
    with torch.inference_mode():
        model.blocks[0]([], chosen)
    with gpu.holding(late):
        gpu.stream = late
        with torch.inference_mode(), contextlib.suppress(KeyboardInterrupt):
            model.blocks[0](looks, chosen, break_off if is_broken_off else go_on)
        gpu.stream = other
        thread, ended = on_another_thread(
            gpu, lambda: model.blocks[0](ours, torch.tensor([0, 1, 6]))
        )
        assert not ended.wait(0.3), "what it still reads is filled anew"
    thread.join()
    assert len(looks) == (2 if is_broken_off else 5)
    assert_seen(looks + ours, expected)


def test_threads_share_a_model(gpu, disk_path):
    """Each waits for memory in use by others, and sees only the experts that it chose."""
    _, expected = written(disk_path / "a")
    gpu.draw(3, 300)
    model = streamed(disk_path / "a", 2)
    found = [[] for _ in range(3)]

    def work(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(8):
            model.blocks[1](found[number], torch.tensor(drawn_choices(generator)[0]))

    threads = [on_another_thread(gpu, lambda number=number: work(number)) for number in range(3)]
    for thread, ended in threads:
        assert ended.wait(120)
        thread.join()
    for looks in found:
        assert_seen(looks, expected)


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_experts_that_are_converted_are_so_for_every_stream(gpu, disk_path, how, monkeypatch):
    """The kernels of the stream that converts them are late."""
    _, expected = written(disk_path / "a", torch.float16)
    model = offload.stream(Stack(how), weights=disk_path / "a", memory_bytes=1 << 28, device="cuda")
    late, other = gpu.new_stream(), gpu.stream
    looks, chosen, are_late = [], torch.tensor([1, 4]), []
    with contextlib.ExitStack() as held, torch.inference_mode():

        def read(tensor):
            if tensor.ndim == 2 and late not in are_late:
                # The reads have finished; the conversions, and kernels behind them, are late.
                gpu.call("cuStreamSynchronize", late)
                held.enter_context(gpu.holding(late))
                are_late.append(late)
            return gpu.peek(tensor)

        monkeypatch.setattr(gpu, "read", read)
        gpu.stream = late
        model.blocks[0](looks, chosen)
        gpu.stream = other
        model.blocks[0](looks, chosen)
    assert_seen(looks, expected)


def choices_of(seed, passes=8):
    generator = torch.Generator().manual_seed(seed)
    return [drawn_choices(generator) for _ in range(passes)]


@pytest.mark.parametrize("slots", [2, 7, 100])
def test_the_report_tells_what_it_does_on_the_host(gpu, disk_path, slots):
    """Only chosen experts are read, and frequently used ones stay."""
    _, expected = written(disk_path / "a")
    told = []
    for device in ("cpu", "cuda"):
        model = streamed(disk_path / "a", slots, device=device)
        for choices in choices_of(5):
            assert_sees(model, expected, choices)
        told.append(offload.report(model).experts)
    on_host, on_device = told
    assert (on_device.uses, on_device.hits) == (on_host.uses, on_host.hits)
    assert on_device.routed_bytes == on_host.routed_bytes
    assert (on_device.hits > 0) == (slots > 2)
    if slots == 100:
        chosen = {one for choices in choices_of(5) for one in wanted(choices) if one[2] is not None}
        assert on_device.read_bytes == sum(MATRIX_BYTES[name] for _, name, _ in chosen)


def test_experts_of_a_checkpoint_are_compared_with_its_digests(gpu, disk_path):
    weights, expected = written(disk_path / "a")
    penstock.save(disk_path / "b", weights)
    gpu.draw(7, 300)
    for _ in range(2):
        model = streamed(disk_path / "b", 3)
        for choices in choices_of(1, 3):
            assert_sees(model, expected, choices)
    name = "blocks.1.experts.down_proj"
    one = next(one for one in penstock.inspect(disk_path / "b").tensors if one.name == name)
    with open(disk_path / "b" / one.file, "r+b") as file:
        file.seek(one.end - 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    model = streamed(disk_path / "b", 3)
    for _ in range(2):
        looks = []
        with pytest.raises(CorruptCheckpointError) as caught, torch.inference_mode():
            model(looks, [[1, 2], [COUNT - 1], [3]])
        assert (caught.value.tensor, caught.value.file) == (name, one.file)
        # No output is computed from it.
        assert (1, name.rpartition(".")[2], COUNT - 1) not in [what for what, _ in looks]


def test_which_experts_are_chosen_is_not_asked_under_capture(gpu, disk_path):
    """Not even if all experts are in memory: the graph would keep today's choice."""
    _, expected = written(disk_path / "a")
    choices = [[1, 2], [0], [3, 3]]
    for slots in (2, 100):
        model = streamed(disk_path / "a", slots)
        assert_sees(model, expected, choices)
        with gpu.capturing(), torch.inference_mode():
            for _ in range(2):
                with pytest.raises(DeviceError, match="captured"):
                    model.blocks[1].experts([], torch.tensor([0]), print)
        assert_sees(model, expected, choices)


def test_a_fork_is_refused(gpu, disk_path, monkeypatch):
    _, expected = written(disk_path / "a")
    model = streamed(disk_path / "a", 3)
    choices = [[1, 2], [0], [3, 3]]
    assert_sees(model, expected, choices)
    with monkeypatch.context() as forked:
        # PyTorch detects a fork once CUDA is in use.
        forked.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
        with torch.inference_mode(), pytest.raises(DeviceError, match="fork"):
            model.blocks[1].experts([], torch.tensor([0]), print)
    assert_sees(model, expected, choices)


def is_right(model, expected, choices):
    with contextlib.suppress(DeviceError):
        assert_sees(model, expected, choices)
        return True
    return False


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync_v2", "cuStreamWaitEvent", "cuEventRecord"])
def test_a_call_of_the_driver_that_fails_is_told_and_the_next_pass_is_right(
    gpu, disk_path, name, how
):
    _, expected = written(disk_path / "a")
    model = streamed(disk_path / "a", 2, how)
    told = 0
    for nth, choices in enumerate(choices_of(3, 20), start=1):
        gpu.fail(name, nth)
        told += not is_right(model, expected, choices)
        gpu.mend()
        # A failed read-ahead is raised by the call that needs it.
        assert any(is_right(model, expected, choices) for _ in range(4))
        gpu.forget()
    assert told > 5


def test_a_moment_that_the_driver_refuses_is_waited_for_later(gpu, disk_path):
    """Memory that a late stream still reads is not refilled, even if recording its event failed."""
    _, expected = written(disk_path / "a")
    model = streamed(disk_path / "a", 2)
    late, other = gpu.new_stream(), gpu.stream
    looks, ours, chosen = [], [], torch.tensor([3, 5])
    with torch.inference_mode():
        model.blocks[0]([], chosen)
    with gpu.holding(late):
        gpu.stream = late
        with torch.inference_mode(), pytest.raises(DeviceError):
            model.blocks[0](looks, chosen, lambda: gpu.fail("cuEventRecord"))
        gpu.stream = other
        gpu.mend()
        thread, ended = on_another_thread(
            gpu, lambda: model.blocks[0](ours, torch.tensor([0, 1, 6]))
        )
        assert not ended.wait(0.3), "what it still reads is filled anew"
    thread.join()
    assert_seen(looks + ours, expected)


def test_uses_are_of_the_device_whichever_one_is_current(gpu, disk_path, monkeypatch):
    """The calling thread's current device may differ from the one of the stream."""
    gpu.driver.penstock_fake_devices(2)
    _, expected = written(disk_path / "a")
    model = streamed(disk_path / "a", 2)
    late, other = gpu.new_stream(), gpu.stream
    looks, ours, chosen = [], [], torch.tensor([3, 5])
    with torch.inference_mode():
        model.blocks[0]([], chosen)
    with gpu.holding(late):
        gpu.stream = late
        with gpu.another_current(monkeypatch), torch.inference_mode():
            model.blocks[0](looks, chosen)
        gpu.stream = other
        thread, ended = on_another_thread(
            gpu, lambda: model.blocks[0](ours, torch.tensor([0, 1, 6]))
        )
        is_over = ended.wait(0.3)
    thread.join()
    assert not is_over, "what a kernel still reads is filled anew"
    assert all(same(seen(), expected[what]) for what, seen in looks + ours)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_break_behind_the_beginning_of_a_read_leaves_no_read_behind(
    gpu, disk_path, device, monkeypatch
):
    """The next data in the same memory is not overwritten by it."""
    _, expected = written(disk_path / "a")
    model = streamed(disk_path / "a", 2, device=device)
    begin, begun = WeightFiles.begin, []

    def broken_off(self, spans, memory, named):
        begun.append(begin(self, spans, memory, named))
        raise KeyboardInterrupt

    with torch.inference_mode():
        model.blocks[0]([], torch.tensor([1]))
        with monkeypatch.context() as patch:
            patch.setattr(WeightFiles, "begin", broken_off)
            with pytest.raises(KeyboardInterrupt):
                model.blocks[0]([], torch.tensor([3]))
        assert all(one.done() for one in begun)
        looks = []
        model.blocks[0](looks, torch.tensor([5]))
    assert begun
    assert all(same(seen(), expected[what]) for what, seen in looks)
