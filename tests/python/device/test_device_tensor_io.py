"""Tensors of a GPU are read from and written to files, in the order of the calling stream."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time

import pytest
import torch

import forks
import penstock
from background import run_to_its_end
from gpu import DRIVER, DTYPES, VARIABLE, drawn, layouts, same
from penstock.errors import (
    DeviceError,
    StorageError,
    TransferCancelledError,
    TransferError,
    UnsupportedStateError,
)
from penstock.offload import TensorIO, wait_all
from penstock.tensors.devices import is_scattered
from penstock.tensors.memory import of_tensor

MIB = 1 << 20
PIECE_BYTES = 4 * MIB

torch.set_num_threads(1)


@pytest.fixture
def io():
    with TensorIO() as io:
        yield io


def device_error_of(work):
    """Runs work; returns its `DeviceError`, if any."""
    try:
        work()
    except DeviceError as error:
        return error
    return None


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_comes_and_goes(gpu, disk_path, io, dtype):
    gpu.draw(3, 200)
    path = disk_path / "a"
    for number, (name, host) in enumerate(layouts(dtype).items()):
        offset = 10_000 * number + 7 * number
        report = io.write(gpu.put(host), path, offset).result()
        expected = bytes_of(host)
        assert path.read_bytes()[offset : offset + len(expected)] == expected, name
        is_direct = not is_scattered(of_tensor(host, name)) and host.numel() > 0
        assert report.device_bytes == (len(expected) if is_direct else 0), name
        assert report.nbytes == len(expected)
        if name == "expanded":
            continue
        items = host.untyped_storage().nbytes() // host.itemsize
        where = (host.shape, host.stride(), host.storage_offset())
        tensor = gpu.put(torch.zeros(items, dtype=dtype).as_strided(*where))
        version = tensor._version
        report = io.read(tensor, path, offset).result()
        assert tensor._version > version
        assert same(gpu.read(tensor), host), name
        assert report.device_bytes == (len(expected) if is_direct else 0), name
        assert report.nbytes == len(expected)


def test_large_tensors_go_in_pieces(gpu, disk_path):
    """Tensors ten times as large as the memory, at unaligned offsets of the file."""
    with TensorIO(staging_bytes=2 * PIECE_BYTES) as io:
        for seed, offset in enumerate((0, 4096, 5, PIECE_BYTES - 1)):
            gpu.draw(seed, 400)
            host = drawn((20 * MIB + 333,), torch.float32, seed)
            report = io.write(gpu.put(host), disk_path / "a", offset).result()
            assert report.nbytes == report.device_bytes == host.nbytes
            with open(disk_path / "a", "rb") as file:
                file.seek(offset)
                assert file.read(host.nbytes) == bytes_of(host)
            tensor = gpu.put(torch.zeros_like(host))
            report = io.read(tensor, disk_path / "a", offset).result()
            assert report.nbytes == report.device_bytes == host.nbytes
            # Only the parts across page boundaries are copied on the way.
            assert report.staged_bytes <= 2 * 4096 * (host.nbytes // PIECE_BYTES + 2)
            assert same(gpu.read(tensor), host)
            gpu.forget()


def test_many_tensors_of_both_kinds_are_one_transfer(gpu, disk_path, io):
    gpu.draw(4, 200)
    sizes = [1, 5000, 0, 3 * MIB, 17, 4096, 2 * MIB + 1, *range(100, 400)]
    hosts = [drawn((size,), torch.uint8, size) for size in sizes]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    tensors = [gpu.put(host) if index % 3 else host for index, host in enumerate(hosts)]
    before = gpu.calls("cuMemcpyDtoHAsync_v2") + gpu.calls("cuMemcpyBatchAsync")
    report = io.write_all(
        zip(tensors, [disk_path / "a"] * len(sizes), offsets, strict=True), sync=True
    ).result()
    calls = gpu.calls("cuMemcpyDtoHAsync_v2") + gpu.calls("cuMemcpyBatchAsync") - before
    assert (disk_path / "a").read_bytes() == b"".join(map(bytes_of, hosts))
    on_gpu = sum(size for index, size in enumerate(sizes) if index % 3)
    assert (report.nbytes, report.device_bytes) == (sum(sizes), on_gpu)
    assert calls < 400
    into = [
        gpu.put(torch.zeros_like(host)) if index % 2 else torch.zeros_like(host)
        for index, host in enumerate(hosts)
    ]
    io.read_all(zip(into, [disk_path / "a"] * len(sizes), offsets, strict=True)).result()
    for index, (tensor, host) in enumerate(zip(into, hosts, strict=True)):
        assert same(gpu.read(tensor) if index % 2 else tensor, host), index


def test_what_a_stream_has_queued_comes_before_and_what_it_gets_after(gpu, disk_path, io):
    for seed in range(20):
        gpu.draw(seed, 300)
        host, other = drawn((MIB,), torch.float32, seed), drawn((MIB,), torch.float32, seed + 99)
        tensor = gpu.put(torch.zeros(MIB))
        # The write has the value that the stream computes.
        gpu.change(tensor, host)
        transfer = io.write(tensor, disk_path / "a")
        transfer.result()
        gpu.change(tensor, other)
        assert (disk_path / "a").read_bytes() == bytes_of(host)
        # A kernel still writes to the tensor before the read.
        io.read(tensor, disk_path / "a").result()
        assert same(gpu.read(tensor), host)
        gpu.forget()


def test_done_means_done_whichever_stream_asks(gpu, disk_path, io):
    """Unlike in stream order, another stream need not wait for the copy: it is done."""
    host = drawn((2 * MIB,), torch.float32)
    io.write(host, disk_path / "a").result()
    for seed in range(20):
        gpu.draw(seed, 400)
        tensor = gpu.put(torch.zeros_like(host))
        gpu.read(tensor)
        transfer = io.read(tensor, disk_path / "a")
        if seed % 2:
            transfer.result()
        else:
            while not transfer.done():
                time.sleep(0.0001)
        gpu.stream = gpu.new_stream()
        assert same(gpu.read(tensor), host)
        gpu.forget()


def test_nothing_is_copied_before_the_stream_has_come_so_far(gpu, disk_path, io):
    host = drawn((2 * MIB,), torch.float32)
    tensor = gpu.put(host)
    io.write(tensor, disk_path / "a").result()
    gpu.read(tensor)
    with gpu.holding(gpu.stream):
        gpu.change(tensor, torch.ones_like(host))
        read = io.read(tensor, disk_path / "a")
        written = io.write(tensor, disk_path / "b")
        time.sleep(0.02)
        assert not read.done()
        assert not written.done()
    wait_all([read, written])
    assert same(gpu.read(tensor), host)


def test_memory_is_kept_until_the_end(gpu, disk_path, io):
    host = drawn((MIB,), torch.float32)
    io.write(host, disk_path / "a").result()
    for seed in range(20):
        gpu.draw(seed, 300)
        tensor = gpu.put(host)
        transfer = io.write(tensor, disk_path / "b")
        del tensor
        gpu.put(torch.ones(MIB))
        transfer.result()
        assert (disk_path / "b").read_bytes() == bytes_of(host)
        tensor = gpu.put(torch.zeros(MIB))
        gpu.read(tensor)
        transfer = io.read(tensor, disk_path / "a")
        del tensor
        mine = gpu.put(torch.ones(MIB))
        transfer.result()
        assert same(gpu.read(mine), torch.ones(MIB))
        gpu.forget()


def test_every_way_to_wait(gpu, disk_path):
    host = drawn((MIB,), torch.float32)

    async def awaited(io, tensor):
        report = await io.read(tensor, disk_path / "a")
        assert report.device_bytes == host.nbytes

    with TensorIO() as io:
        io.write(host, disk_path / "a", sync=True).result()
        gpu.draw(7, 400)
        tensors = [gpu.put(torch.zeros_like(host)) for _ in range(5)]
        asyncio.run(awaited(io, tensors[0]))
        wait_all([io.read(tensors[1], disk_path / "a")])
        io.read(tensors[2], disk_path / "a")
        io.wait()
        transfer = io.read(tensors[3], disk_path / "a")
        with contextlib.suppress(TimeoutError):
            transfer.result(0)
        assert transfer.result(100).nbytes == host.nbytes
        io.read(tensors[4], disk_path / "a")
    for tensor in tensors:
        assert same(gpu.read(tensor), host)


def test_a_transfer_that_is_given_up(gpu, disk_path):
    with TensorIO(staging_bytes=2 * PIECE_BYTES) as io:
        host = drawn((16 * MIB,), torch.float32)
        tensor = gpu.put(host)
        gpu.read(tensor)
        with gpu.holding(gpu.stream):
            gpu.change(tensor, host)
            transfer = io.write(tensor, disk_path / "a")
            transfer.cancel()
        with pytest.raises(TransferCancelledError):
            transfer.result()
        transfer = io.write(tensor, disk_path / "a")
        transfer.result()
        # All was done before.
        transfer.cancel()
        assert transfer.result().nbytes == host.nbytes
        assert (disk_path / "a").read_bytes() == bytes_of(host)


def test_errors_of_files_are_those_of_any_transfer(gpu, disk_path, io):
    host = drawn((MIB,), torch.float32)
    io.write(host, disk_path / "a").result()
    tensor = gpu.put(torch.zeros(2 * MIB))
    transfer = io.read(tensor, disk_path / "a")
    for _ in range(2):
        with pytest.raises(TransferError, match="ends before") as caught:
            transfer.result()
        assert caught.value.path == str(disk_path / "a")
        assert caught.value.offset >= host.nbytes
    # A piece that did not arrive whole is not copied.
    assert not gpu.read(tensor)[MIB:].any()
    with pytest.raises(StorageError):
        io.read(tensor, disk_path / "nothing")
    both = io.read_all([(torch.zeros(MIB), disk_path / "a", 4), (tensor, disk_path / "a", 0)])
    with pytest.raises(TransferError):
        both.result()
    if os.path.exists("/dev/full") and hasattr(os, "posix_fallocate"):
        with pytest.raises(penstock.PenstockError):
            io.write(gpu.put(host), "/dev/full").result()


def test_what_cannot_be_read_into_is_refused(gpu, disk_path, io):
    io.write(torch.zeros(MIB), disk_path / "a").result()
    for tensor in (
        torch.empty(4, device="meta"),
        gpu.put(torch.zeros(1).expand(5)),
        gpu.put(torch.zeros(2000).as_strided((4, 600), (100, 1))),
    ):
        with pytest.raises(UnsupportedStateError):
            io.read(tensor, disk_path / "a").result()
    with pytest.raises(penstock.PenstockError):
        io.write(torch.empty(4, device="meta"), disk_path / "a")


CALLS = [
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventQuery",
    "cuEventSynchronize",
]


@pytest.mark.parametrize("name", CALLS)
def test_each_call_that_fails_is_told_or_made_up_for(gpu, disk_path, name):
    # One byte more than two pieces.
    host = drawn((2 * PIECE_BYTES + 1,), torch.uint8)
    zeros, content = torch.zeros_like(host), bytes_of(host)
    with TensorIO(staging_bytes=2 * PIECE_BYTES) as io:
        io.write(host, disk_path / "a").result()
        tensor, source = gpu.put(zeros), gpu.put(host)
        told = 0
        for nth in range(1, 14):
            gpu.change(tensor, zeros)
            gpu.call("cuStreamSynchronize", gpu.stream)
            for move, there in (
                (lambda: io.read(tensor, disk_path / "a"), lambda: same(gpu.read(tensor), host)),
                (
                    lambda: io.write(source, disk_path / "b"),
                    lambda: (disk_path / "b").read_bytes() == content,
                ),
            ):
                gpu.fail(name, nth)
                error = device_error_of(lambda move=move: move().result())
                gpu.mend()
                if error is None:
                    assert there()
                else:
                    told += 1
                    assert error.code == 999
                    assert name in str(error)
            gpu.forget()
        assert told > 0 or name in ("cuEventQuery", "cuEventSynchronize")
        io.read(tensor, disk_path / "a").result()
        assert same(gpu.read(tensor), host)


def test_in_a_capture_it_is_refused_and_the_capture_goes_on(gpu, disk_path, io):
    host = drawn((300, 300), torch.float32)
    tensor = gpu.put(host)
    scattered = type(tensor)(gpu, tensor.storage_address, host.t(), tensor.block)
    io.write(tensor, disk_path / "a").result()
    gpu.forget()
    with gpu.capturing():
        for move in (
            lambda: io.write(tensor, disk_path / "a"),
            lambda: io.read(tensor, disk_path / "a"),
            lambda: io.write(scattered, disk_path / "a"),
            lambda: io.read(scattered, disk_path / "a"),
        ):
            with pytest.raises(DeviceError, match="outside of the capture") as caught:
                move()
            assert caught.value.code is None
    io.read(tensor, disk_path / "a").result()
    assert same(gpu.read(tensor), host)


def test_nothing_is_left_behind(gpu, disk_path):
    host = drawn((10 * MIB,), torch.float32)
    left = []
    for turn in range(4):
        with TensorIO(staging_bytes=2 * PIECE_BYTES) as io:
            for seed in range(3):
                tensor = gpu.put(host)
                io.write(tensor, disk_path / "a")
                gpu.fail("cuMemcpyDtoHAsync_v2", seed + 2)
                with contextlib.suppress(DeviceError):
                    io.write(tensor, disk_path / "b").result()
                gpu.mend()
                with contextlib.suppress(DeviceError):
                    io.wait()
        gc.collect()
        gpu.forget()
        penstock._native.CachingHostAllocator(0, False).release()
        found = gpu.leaks()
        if turn:
            left.append({kind: found[kind] for kind in ("registered", "streams", "events")})
    assert left[0] == left[1] == left[2]


def run_on_driver(script, path, **environment):
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")
    here = DRIVER.parents[2] / "tests/python"
    variables = {VARIABLE: str(DRIVER)} | environment
    return run_to_its_end(script, path, here, popen=forks.Popen, **variables)


def test_a_fork_moves_what_the_host_has_and_refuses_the_rest(disk_path):
    script = """
        import os, sys, torch
        sys.path.insert(0, sys.argv[2])
        import penstock
        from penstock.offload import TensorIO
        from gpu import taken_for_real
        # Threads of OpenMP do not live on in a fork.
        torch.set_num_threads(1)
        with taken_for_real() as gpu:
            io = TensorIO()
            host = torch.arange(1000.0)
            tensor = gpu.put(host)
            done = io.write(tensor, sys.argv[1])
            done.result()
            child = os.fork()
            if child == 0:
                try:
                    assert not done.done()
                    mine = torch.zeros(1000)
                    io.read(mine, sys.argv[1]).result()
                    assert torch.equal(mine, host)
                    for ask in (
                        lambda: io.read(tensor, sys.argv[1]),
                        lambda: io.write(tensor, sys.argv[1]),
                        done.result,
                    ):
                        try:
                            ask()
                        except penstock.PenstockError as error:
                            assert "fork" in str(error), error
                        else:
                            os._exit(7)
                    io.close()
                    os._exit(0)
                except BaseException as error:
                    print(repr(error), flush=True)
                    os._exit(8)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
            io.read(tensor, sys.argv[1]).result()
            assert torch.equal(gpu.read(tensor), host)
            io.close()
    """
    ended = run_on_driver(script, disk_path / "a")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_without_a_driver_pytorch_copies(disk_path):
    script = """
        import sys, torch
        sys.path.insert(0, sys.argv[2])
        from penstock.offload import TensorIO, wait_all
        from gpu import taken_for_real
        with taken_for_real() as gpu, TensorIO() as io:
            host = torch.arange(1000.0)
            report = io.write(gpu.put(host), sys.argv[1]).result()
            assert (report.nbytes, report.device_bytes) == (4000, 0)
            tensors = [gpu.put(torch.zeros(1000)) for _ in range(3)]
            report = io.read(tensors[0], sys.argv[1]).result()
            assert (report.nbytes, report.device_bytes) == (4000, 0)
            wait_all([io.read(tensors[1], sys.argv[1])])
            io.read(tensors[2], sys.argv[1])
            io.wait()
            for tensor in tensors:
                assert torch.equal(gpu.read(tensor), host)
    """
    ended = run_on_driver(script, disk_path / "a", **{VARIABLE: "/nowhere/libcuda.so.1"})
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_where_nothing_may_be_pinned_it_goes_all_the_same(disk_path):
    script = """
        import sys, torch
        sys.path.insert(0, sys.argv[2])
        from penstock.offload import TensorIO
        from gpu import taken_for_real
        with taken_for_real() as gpu, TensorIO() as io:
            host = torch.arange(1000.0)
            report = io.write(gpu.put_pageable(host), sys.argv[1]).result()
            assert [one.kind for one in report.fallbacks][-1] == "unpinned"
            tensor = gpu.put_pageable(torch.zeros(1000))
            assert io.read(tensor, sys.argv[1]).result().device_bytes == 4000
            assert torch.equal(gpu.read(tensor), host)
    """
    ended = run_on_driver(script, disk_path / "a", PENSTOCK_FAKE_PINNED_BYTES="0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
