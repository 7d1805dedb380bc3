"""Rows requested by kernels of a GPU, on the driver for tests."""

import os
import threading

import numpy as np
import pytest
import torch

import penstock
from gpu import DTYPES, drawn, same
from penstock import features
from penstock.errors import CorruptCheckpointError, DeviceError

ROWS = 300


@pytest.fixture
def opened(tmp_path, gpu):
    tables = []

    def open_table(rows, **keywords):
        path = str(tmp_path / f"table-{len(tables)}")
        features.write(path, rows)
        tables.append(features.open(path, **keywords))
        return tables[-1]

    yield open_table
    for table in tables:
        table.close()


def gathered(gpu, served, rows, ids):
    """Gathers rows by a kernel, and waits for it."""
    out = gpu.put(torch.zeros((*ids.shape, *rows.shape[1:]), dtype=rows.dtype))
    assert served.gather(gpu.put(ids), out=out) is out
    return gpu.read(out)


# safetensors has no name for the other one.
STORED = [dtype for dtype in DTYPES if dtype is not torch.complex128]


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_rows_of_every_type(gpu, opened, dtype):
    rows = drawn((ROWS, 5), dtype)
    table = opened(rows)
    with table.on_device("cuda:0") as served:
        for kind in (torch.int64, torch.int32):
            ids = torch.randint(0, ROWS, (3, 50), dtype=kind)
            assert same(gathered(gpu, served, rows, ids), rows[ids.long()])
        served.check()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("width", [1, 129, 1024, 3000])
def test_rows_of_every_size(gpu, opened, cached, width):
    rows = drawn((ROWS, width), torch.float32)
    cache = features.Cache(64 * width * 4) if cached else None
    table = opened(rows, cache=cache)
    served = table.on_device(staging_bytes=1 << 20)
    for seed, count in enumerate((1, 32, 33, 700)):
        ids = torch.from_numpy(np.random.default_rng(seed).integers(0, ROWS, count))
        assert same(gathered(gpu, served, rows, ids), rows[ids])
    served.check()
    assert table.stats().rows == 766


def test_a_result_of_its_own_and_of_nothing(gpu, opened):
    rows = drawn((ROWS, 3), torch.float64)
    served = opened(rows).on_device()
    ids, none = gpu.put(torch.arange(ROWS)), gpu.put(torch.zeros((0, 2), dtype=torch.int64))
    assert same(gpu.read(served.gather(ids)), rows)
    assert served.gather(none).shape == (0, 2, 3)


def test_it_is_in_order_of_the_stream(gpu, opened):
    rows = drawn((ROWS, 16), torch.float32)
    served = opened(rows).on_device(staging_bytes=0)
    assert served.slots == 2
    ids = gpu.put(torch.zeros(100, dtype=torch.int64))
    out = gpu.put(torch.zeros((100, 16)))
    gpu.draw(7, 2000)
    for seed in range(10):
        # The ids come from the stream, and their rows are read before the next ids are written.
        wanted = torch.from_numpy(np.random.default_rng(seed).integers(0, ROWS, 100))
        gpu.change(ids, wanted)
        served.gather(ids, out=out)
        assert same(gpu.read(out), rows[wanted])
    served.check()


def test_threads_share_it(gpu, opened):
    rows = drawn((ROWS, 40), torch.float32)
    served = opened(rows).on_device(staging_bytes=1 << 16)
    failures = []

    def work(seed):
        gpu.call("cuCtxPushCurrent_v2", gpu._context)
        generator = np.random.default_rng(seed)
        for _ in range(20):
            ids = torch.from_numpy(generator.integers(0, ROWS, 90))
            if not same(gathered(gpu, served, rows, ids), rows[ids]):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    served.check()


def test_a_row_that_there_is_not_is_told_once_and_others_come(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    table = opened(rows)
    served = table.on_device()
    for wrong in (ROWS, -1):
        gathered(gpu, served, rows, torch.tensor([3, wrong]))
        with pytest.raises(IndexError, match=f"asked for row {wrong}: .* rows 0 to {ROWS - 1}"):
            served.check()
        served.check()
    ids = torch.tensor([5, 6])
    assert same(gathered(gpu, served, rows, ids), rows[ids])


def test_a_damaged_block_is_told(gpu, opened):
    rows = drawn((ROWS, 1024), torch.float32)
    table = opened(rows)
    segment = table.source.segments[0]
    with open(segment.path, "r+b") as file:
        file.seek(segment.offset + 7 * 4096)
        file.write(b"\xff" * 8)
    served = table.on_device()
    ids = torch.tensor([7])
    assert not gathered(gpu, served, rows, ids).any(), "nothing that is damaged arrives"
    with pytest.raises(CorruptCheckpointError, match="row 7"):
        served.check()


def test_a_table_that_was_replaced_is_told(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    table = opened(rows)
    served = table.on_device()
    os.utime(table.source.segments[0].path, ns=(1, 1))
    gathered(gpu, served, rows, torch.tensor([7]))
    with pytest.raises(CorruptCheckpointError, match="has changed"):
        served.check()


def test_what_does_not_fit_is_refused(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    table = opened(rows)
    served = table.on_device()
    ids, out = gpu.put(torch.tensor([1, 2])), gpu.put(torch.zeros((2, 4)))
    with pytest.raises(TypeError, match="list: use a tensor"):
        served.gather([1, 2], out=out)
    with pytest.raises(TypeError, match="int16: use a contiguous tensor of int32 or int64"):
        served.gather(gpu.put(torch.tensor([1, 2], dtype=torch.int16)), out=out)
    with pytest.raises(TypeError, match="contiguous"):
        served.gather(gpu.put(torch.arange(4)[::2]), out=out)
    with pytest.raises(ValueError, match="ids: on cpu: needed is one on cuda:0"):
        served.gather(torch.tensor([1, 2]), out=out)
    with pytest.raises(ValueError, match="out: on cpu"):
        served.gather(ids, out=torch.zeros((2, 4)))
    for wrong in (torch.zeros((3, 4)), torch.zeros((2, 4), dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"needed is a contiguous float32 of shape \(2, 4\)"):
            served.gather(ids, out=gpu.put(wrong))
    with pytest.raises(ValueError, match="kernels of CUDA devices alone"):
        table.on_device("cpu")
    with pytest.raises(ValueError, match="staging_bytes"):
        table.on_device(staging_bytes=-1)
    with pytest.raises(DeviceError, match="99"):
        table.on_device("cuda:99")
    assert same(gathered(gpu, served, rows, torch.tensor([1])), rows[1:2])


def test_closed_it_says_so_and_leaves_nothing(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    table = opened(rows)
    pinned = gpu.calls("cuMemHostUnregister")
    served = table.on_device()
    ids, out = gpu.put(torch.tensor([1, 2])), gpu.put(torch.zeros((2, 4)))
    with table.on_device() as other:
        other.gather(ids, out=out)
    served.close()
    served.close()
    assert gpu.calls("cuMemHostUnregister") == pinned + 4, "two of each"
    for call in (lambda: served.gather(ids, out=out), served.check, served.serving().__enter__):
        with pytest.raises(ValueError, match="is closed: make another one"):
            call()
    last = table.on_device()
    table.close()
    with pytest.raises(ValueError, match="is closed"):
        last.gather(ids, out=out)


@pytest.mark.parametrize("end", ["close", "with", "drop", "table"])
def test_what_was_queued_gets_its_rows_before_the_end(gpu, opened, end):
    rows = drawn((ROWS, 4), torch.float32)
    table = opened(rows)
    ids, out = gpu.put(torch.arange(ROWS)), gpu.put(torch.zeros((ROWS, 4)))
    for _ in range(1 if end == "table" else 10):
        gpu.change(out, torch.zeros((ROWS, 4)))
        if end == "with":
            with table.on_device(staging_bytes=0) as served:
                served.gather(ids, out=out)
        elif end == "drop":
            table.on_device(staging_bytes=0).gather(ids, out=out)
        else:
            served = table.on_device(staging_bytes=0)
            served.gather(ids, out=out)
            (table if end == "table" else served).close()
        assert same(gpu.read(out), rows)


def test_the_end_tells_what_nobody_has_asked_for(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    table = opened(rows)
    with pytest.raises(IndexError, match=f"row {ROWS}"), table.on_device() as served:
        gathered(gpu, served, rows, torch.tensor([ROWS]))
    served = table.on_device()
    gathered(gpu, served, rows, torch.tensor([ROWS]))
    served.__exit__(KeyError, KeyError(), None)
    table.on_device().gather(gpu.put(torch.tensor([ROWS])), out=gpu.put(torch.zeros((1, 4))))
    served = table.on_device()
    gathered(gpu, served, rows, torch.tensor([ROWS]))
    with pytest.raises(IndexError, match=f"row {ROWS}"):
        table.close()
    table.close()


def test_the_end_leaves_captures_of_others_alone(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    served = opened(rows).on_device()
    ids, out = gpu.put(torch.arange(ROWS)), gpu.put(torch.zeros((ROWS, 4)))
    served.gather(ids, out=out)
    assert same(gpu.read(out), rows)
    with gpu.capturing():
        served.close()


def test_kernels_are_served_until_the_stream_is_done(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    served = opened(rows).on_device()
    ids, out = gpu.put(torch.arange(ROWS)), gpu.put(torch.zeros((ROWS, 4)))
    gpu.draw(3, 20_000)
    for _ in range(5):
        with served.serving():
            served.gather(ids, out=out)
        assert gpu.driver.cuStreamQuery(gpu.stream) == 0, "the stream is done"


def test_kernels_of_ones_own(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    served = opened(rows).on_device()
    assert served.address > 0
    assert (served.post_rows, served.slots) == (32, 4096)
    ids = torch.tensor([4, 2])
    with served.serving():
        assert same(gathered(gpu, served, rows, ids), rows[ids])
    for name in ("penstock_post(", "penstock_take("):
        assert name in features.cuda_header()


def test_a_captured_stream_is_refused_and_the_capture_goes_on(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    served = opened(rows).on_device()
    ids, out = gpu.put(torch.tensor([1, 2])), gpu.put(torch.zeros((2, 4)))
    with gpu.capturing(), pytest.raises(DeviceError, match="captured"):
        served.gather(ids, out=out)
    assert same(gpu.read(served.gather(ids, out=out)), rows[1:3])


@pytest.mark.parametrize(
    "call", ["cuModuleLoadData", "cuMemHostRegister_v2", "cuMemAlloc_v2", "cuModuleGetFunction"]
)
def test_what_the_driver_refuses_is_told(gpu, opened, call):
    table = opened(drawn((ROWS, 4), torch.float32))
    gpu.driver.penstock_fake_fail_call(call.encode(), 1, 2)
    with pytest.raises(DeviceError, match=call):
        table.on_device()
    table.on_device().close()


def test_a_fork_is_told_to_open_the_table(gpu, opened):
    rows = drawn((ROWS, 4), torch.float32)
    table = opened(rows)
    served = table.on_device()
    ids, out = gpu.put(torch.tensor([1, 2])), gpu.put(torch.zeros((2, 4)))

    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(penstock.PenstockError, match="fork"):
                served.gather(ids, out=out)
            served.close()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert same(gpu.read(served.gather(ids, out=out)), rows[1:3])
