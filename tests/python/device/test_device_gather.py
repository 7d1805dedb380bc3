"""Rows are on a GPU when its stream needs them, in the order of the gathering stream."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time

import numpy as np
import pytest
import torch

import forks
import penstock
from background import run_to_its_end
from gpu import DRIVER, DTYPES, VARIABLE, drawn, same
from penstock import features
from penstock.errors import CorruptCheckpointError, DeviceError

MIB = 1 << 20
ROWS = 3000

torch.set_num_threads(1)


def written(path, dtype=torch.float32, width=64, rows=ROWS, seed=0):
    """Writes a table with checksums; returns its rows."""
    content = drawn((rows, width), dtype, seed)
    features.write(path, content)
    return content


def ids_of(count, seed=0, rows=ROWS):
    return torch.randint(rows, (count,), generator=torch.Generator().manual_seed(seed))


def run_on_driver(script, path, popen=forks.Popen, **environment):
    """Runs a script in a process of its own; its second argument is this directory."""
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")
    here = DRIVER.parents[2] / "tests/python"
    variables = {VARIABLE: str(DRIVER)} | environment
    return run_to_its_end(script, path, here, popen=popen, **variables)


def device_error_of(work):
    """Runs work; returns its `DeviceError`, if any."""
    try:
        work()
    except DeviceError as error:
        return error
    return None


def target(gpu, content, ids):
    """Returns memory of the GPU for rows, with other contents."""
    return gpu.put(torch.zeros((*ids.shape, *content.shape[1:]), dtype=content.dtype))


# Tables may also be plain safetensors, which have no `complex128`.
@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.itemsize < 16], ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_every_dtype_arrives(gpu, disk_path, dtype, cached):
    gpu.draw(3, 200)
    content = written(disk_path / "a", dtype, width=37)
    cache = features.Cache(MIB) if cached else None
    with features.open(disk_path / "a", cache=cache) as table:
        for seed in range(3):
            ids = ids_of(2 * 250, seed, 600).reshape(2, 250)
            out = target(gpu, content, ids)
            version = out._version
            assert table.gather(ids, out=out) is out
            assert out._version > version
            assert same(gpu.read(out), content[ids])
        stats = table.stats()
        assert stats.device_bytes == 3 * ids.numel() * content[0].nbytes
        assert stats.rows == 3 * ids.numel()
        assert (stats.hits > 0) == cached
        assert stats.fallbacks == () or all(one.kind != "unpinned" for one in stats.fallbacks)


def test_ids_of_the_gpu_and_a_device_make_results_there(gpu, disk_path):
    content = written(disk_path / "a")
    with features.open(disk_path / "a") as table:
        ids = ids_of(100)
        on_gpu = gpu.put(ids)
        gpu.draw(5, 300)
        # The gather waits for ids that are still being written.
        gpu.change(on_gpu, ids.flip(0).contiguous())
        rows = table.gather(on_gpu)
        assert rows.device.type == "cuda"
        assert same(gpu.read(rows), content[ids.flip(0)])
        for where in ("cuda", "cuda:0", torch.device("cuda", 0)):
            rows = table.gather(ids.tolist(), device=where)
            assert rows.device == torch.device("cuda:0")
            assert same(gpu.read(rows), content[ids])
        assert isinstance(table.gather(ids.numpy()), np.ndarray)
        rows = table.gather(on_gpu, device="cpu")
        assert rows.device.type == "cpu"
        assert same(rows, content[ids.flip(0)])
        assert isinstance(table.gather(ids.numpy(), device="cpu"), torch.Tensor)
        host = torch.empty(100, 64)
        assert table.gather(on_gpu, out=host) is host
        assert same(host, content[ids.flip(0)])


def test_repeated_ids_no_ids_and_one(gpu, disk_path):
    content = written(disk_path / "a")
    with features.open(disk_path / "a") as table:
        for ids in (
            torch.tensor([7, 7, 7, 2999, 0, 7]),
            torch.empty(0, dtype=torch.int64),
            torch.empty((3, 0), dtype=torch.int64),
            torch.tensor(5),
        ):
            out = target(gpu, content, ids)
            assert table.gather(ids, out=out) is out
            assert same(gpu.read(out), content[ids])
        assert table.stats().device_bytes == 7 * 256


def test_a_large_batch_goes_in_pieces_through_bounded_memory(gpu, disk_path):
    """100 MB of rows pass through smaller pinned memory, and arrive in their places."""
    gpu.draw(2, 300)
    content = written(disk_path / "a", torch.int16, width=2048)
    ids = ids_of(70_000)
    with features.open(disk_path / "a", cache=features.Cache(4 * MIB)) as table:
        out = target(gpu, content, ids)
        gpu.forget()
        before = gpu.calls("cuLaunchKernel")
        pending = table.gather_async(ids, out=out)
        assert pending.result() is out
        # One kernel places each piece; it needs 8 bytes per row for the row's place.
        pieces = gpu.calls("cuLaunchKernel") - before
        assert pieces == -(-ids.numel() * (4096 + 8) // (16 * MIB))
        assert gpu.leaks()["pinned_bytes"] <= 1 << 30
        found = gpu.read(out)
        for first in range(0, ids.numel(), 10_000):
            some = slice(first, first + 10_000)
            assert same(found[some], content[ids[some]])
        assert table.stats().device_bytes == ids.numel() * 4096


def test_a_small_batch_is_one_copy(gpu, disk_path):
    content = written(disk_path / "a")
    with features.open(disk_path / "a") as table:
        ids = ids_of(1000)
        out = target(gpu, content, ids)
        before = gpu.calls("cuMemcpyHtoDAsync_v2") + gpu.calls("cuMemcpyBatchAsync")
        table.gather(ids, out=out)
        after = gpu.calls("cuMemcpyHtoDAsync_v2") + gpu.calls("cuMemcpyBatchAsync")
        assert after - before == 1


def test_what_the_stream_has_comes_before_and_what_it_gets_after(gpu, disk_path):
    content = written(disk_path / "a", width=256)
    with features.open(disk_path / "a", cache=features.Cache(8 * MIB)) as table:
        for seed in range(30):
            gpu.draw(seed, 300)
            ids = ids_of(500, seed)
            out = target(gpu, content, ids)
            # A kernel still writes to the memory before the gather, and one reads it afterwards.
            gpu.change(out, torch.ones(500, 256))
            rows = table.gather(ids, out=out)
            assert same(gpu.read(rows), content[ids])
            gpu.forget()


def test_nothing_is_copied_before_the_stream_has_come_so_far(gpu, disk_path):
    content = written(disk_path / "a")
    ids = ids_of(500)
    with features.open(disk_path / "a") as table:
        out = target(gpu, content, ids)
        gpu.read(out)
        ahead = gpu.put(torch.zeros(1000))
        gpu.read(ahead)
        with gpu.holding(gpu.stream):
            gpu.change(out, torch.ones(500, 64))
            # The host does not wait for it.
            assert table.gather(ids, out=out) is out
            time.sleep(0.02)
        assert same(gpu.read(out), content[ids])


def test_the_stream_that_waits_is_the_one_that_is_current_then(gpu, disk_path):
    content = written(disk_path / "a", width=1024)
    with features.open(disk_path / "a", cache=features.Cache(16 * MIB)) as table:
        for seed in range(10):
            gpu.draw(seed, 400)
            ids = ids_of(1000, seed)
            pending = table.gather_async(ids, device="cuda")
            gpu.stream = gpu.new_stream()
            assert same(gpu.read(pending.result()), content[ids])
            gpu.stream = gpu.new_stream()
            assert same(gpu.read(pending.result()), content[ids])


def test_memory_that_is_dropped_at_once_is_not_filled_later(gpu, disk_path):
    """The rows are never fetched, so their memory could be reused before the copy is done."""
    content = written(disk_path / "a", width=1024)
    with features.open(disk_path / "a", cache=features.Cache(16 * MIB)) as table:
        ids = ids_of(1000)
        table.gather(ids, device="cuda")
        for seed in range(20):
            gpu.draw(seed, 300)
            out = target(gpu, content, ids)
            gpu.read(out)
            pending = table.gather_async(ids, out=out)
            del out
            while not pending.done():
                time.sleep(0.0001)
            del pending
            mine = gpu.put(torch.ones(1000, 1024))
            assert same(gpu.read(mine), torch.ones(1000, 1024))
            time.sleep(0.002)
            assert same(gpu.read(mine), torch.ones(1000, 1024))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_stream_of_batches(gpu, disk_path, cached, on_gpu):
    content = written(disk_path / "a", width=256)
    cache = features.Cache(MIB) if cached else None
    gpu.draw(9, 200)
    with features.open(disk_path / "a", cache=cache) as table:
        batches = [ids_of(100 + 37 * seed, seed) for seed in range(40)]
        given = [gpu.put(ids) for ids in batches] if on_gpu else batches
        count = 0
        for ids, rows in table.stream(given, device=None if on_gpu else "cuda"):
            assert same(gpu.read(ids) if on_gpu else ids, batches[count])
            assert rows.device.type == "cuda"
            assert same(gpu.read(rows), content[batches[count]])
            count += 1
        assert count == len(batches)
        assert table.stats().device_bytes == sum(map(len, batches)) * 1024
    # A stream that is left early leaks nothing.
    with features.open(disk_path / "a", cache=cache) as table:
        for _, rows in table.stream(batches, device="cuda"):
            assert same(gpu.read(rows), content[batches[0]])
            break


def test_rows_that_are_hinted(gpu, disk_path):
    content = written(disk_path / "a", torch.int16, width=2048)
    with features.open(disk_path / "a", cache=features.Cache(4 * MIB)) as table:
        batches = [ids_of(6000, seed) for seed in range(4)]
        known = [table.hint(ids) for ids in batches]
        for ids, hinted in zip(batches, known, strict=True):
            rows = hinted.gather_async(device="cuda").result()
            assert same(gpu.read(rows), content[ids])
        with_known = table.stats()
        assert with_known.hits > 0
        out = target(gpu, content, batches[0])
        hinted = table.hint(batches[0])
        assert same(gpu.read(hinted.gather_async(out).result()), content[batches[0]])
        hinted = table.hint(gpu.put(batches[1]))
        assert same(gpu.read(hinted.gather_async().result()), content[batches[1]])


def test_many_under_way_at_once_pass_through(gpu, disk_path):
    """More than the memory has room for; all are begun before any result is fetched."""
    content = written(disk_path / "a", torch.int16, width=2048)
    with features.open(disk_path / "a", cache=features.Cache(4 * MIB)) as table:
        batches = [ids_of(2500, seed) for seed in range(20)]
        pending = [table.gather_async(ids, device="cuda") for ids in batches]
        for ids, one in reversed(list(zip(batches, pending, strict=True))):
            assert same(gpu.read(one.result()), content[ids])
            assert one.done()


def test_awaiting_and_waiting_for_some_time(gpu, disk_path):
    content = written(disk_path / "a")

    async def gathered(table, ids):
        return await table.gather_async(ids, device="cuda")

    with features.open(disk_path / "a") as table:
        ids = ids_of(100)
        assert same(gpu.read(asyncio.run(gathered(table, ids))), content[ids])
        pending = table.gather_async(ids, device="cuda")
        with contextlib.suppress(TimeoutError):
            pending.result(0)
        assert same(gpu.read(pending.result(100)), content[ids])


def test_an_id_without_a_row_is_told_at_the_call(gpu, disk_path):
    content = written(disk_path / "a")
    with features.open(disk_path / "a") as table:
        out = target(gpu, content, torch.zeros(3))
        for ids in ([1, 2, ROWS], [1, -1, 2], gpu.put(torch.tensor([0, 1, ROWS]))):
            with pytest.raises(IndexError, match="ids"):
                table.gather_async(ids, out=out)
        assert table.stats().rows == 0


def test_what_does_not_fit_is_refused(gpu, disk_path):
    content = written(disk_path / "a")
    ids = ids_of(4)
    with features.open(disk_path / "a") as table:
        good = target(gpu, content, ids)
        for bad in (
            gpu.put(torch.zeros(4, 63)),
            gpu.put(torch.zeros(4, 64, dtype=torch.int32)),
            gpu.put(torch.zeros(64, 4).t()),
            torch.empty(4, 64, device="meta"),
        ):
            with pytest.raises(ValueError, match="out: "):
                table.gather(ids, out=bad)
        for device in ("cpu", "cuda:1", "xpu"):
            with pytest.raises(ValueError, match="out: "):
                table.gather(ids, out=good, device=device)
        with pytest.raises(ValueError, match="out: "):
            table.gather(ids, out=np.empty((4, 64), np.float32), device="cuda")
        for device in ("nowhere", "meta", 3.5):
            with pytest.raises(ValueError, match="device="):
                table.gather(ids, device=device)
        assert table.gather(ids, out=good, device="cuda") is good
    with pytest.raises(ValueError, match="closed"):
        table.gather(ids, out=good)


def test_damage_never_reaches_the_gpu(gpu, disk_path):
    content = written(disk_path / "a", width=1024)
    with features.open(disk_path / "a") as table:
        segment = table.source.segments[0]
        ids = torch.tensor([10, 2000, 30])
        with open(segment.path, "r+b") as file:
            file.seek(segment.offset + 2000 * 4096 + 100)
            file.write(b"\xff\0damage\0\xff")
        # Accepts the new modification time, so that only the checksum can find the damage.
        marks = table._files._marks
        marks.accept(segment.path, marks.inspect(segment.path)[1])
        every = torch.arange(ROWS)
        out = target(gpu, content, every)
        pending = table.gather_async(every, out=out)
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError, match="is damaged"):
                pending.result()
        assert pending.done()
        # Intact rows arrive.
        assert same(gpu.read(table.gather(ids[[0, 2]], device="cuda")), content[ids[[0, 2]]])
        assert not gpu.read(out).any()
        assert table.stats().device_bytes == 2 * 4096


def test_a_file_that_ends_early_is_an_error(gpu, disk_path):
    written(disk_path / "a", width=1024)
    with features.open(disk_path / "a") as table:
        os.truncate(table.source.segments[0].path, 8 * MIB)
        pending = table.gather_async(torch.arange(ROWS), device="cuda")
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError, match="has changed"):
                pending.result()


CALLS = [
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyHtoDAsync_v2",
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventQuery",
    "cuEventSynchronize",
]


@pytest.mark.parametrize("name", CALLS)
def test_each_call_that_fails_is_told_or_made_up_for(gpu, disk_path, name):
    content = written(disk_path / "a", torch.int16, width=2048)
    with features.open(disk_path / "a", cache=features.Cache(16 * MIB)) as table:
        # Of two pieces.
        ids = ids_of(4500)
        out = target(gpu, content, ids)
        table.gather(ids, out=out)
        gpu.read(out)
        expected, zeros = content[ids], torch.zeros(4500, 2048, dtype=torch.int16)
        told = 0
        for nth in range(1, 12):
            gpu.change(out, zeros)
            gpu.call("cuStreamSynchronize", gpu.stream)
            gpu.fail(name, nth)
            error = device_error_of(lambda: table.gather(ids, out=out))
            gpu.mend()
            if error is None:
                assert same(gpu.read(out), expected)
            else:
                told += 1
                assert error.code == 999
                assert name in str(error)
            gpu.forget()
        # These two are called only for finished copies, when no caller waits for the rows any more.
        assert told > 0 or name in ("cuEventQuery", "cuEventSynchronize")
        assert same(gpu.read(table.gather(ids, device="cuda")), expected)


def test_a_gather_in_a_capture_is_refused_and_the_capture_goes_on(gpu, disk_path):
    content = written(disk_path / "a")
    with features.open(disk_path / "a") as table:
        ids = ids_of(100)
        out, on_gpu = target(gpu, content, ids), gpu.put(ids)
        begun = table.gather_async(ids, out=target(gpu, content, ids))
        gpu.forget()
        with gpu.capturing():
            for ask in (
                lambda: table.gather(ids, out=out),
                lambda: table.gather_async(ids, out=out),
                lambda: table.gather(on_gpu),
                lambda: table.hint(on_gpu),
                begun.result,
            ):
                with pytest.raises(DeviceError, match="outside of the capture") as caught:
                    ask()
                assert caught.value.code is None
        assert same(gpu.read(begun.result()), content[ids])
        assert same(gpu.read(table.gather(ids, out=out)), content[ids])


def test_where_nothing_may_be_pinned_rows_come_all_the_same(disk_path):
    script = """
        import sys, torch
        sys.path.insert(0, sys.argv[2])
        from penstock import features
        from gpu import taken_for_real
        with taken_for_real() as gpu:
            content = torch.arange(6000.0).reshape(1000, 6)
            features.write(sys.argv[1], content)
            with features.open(sys.argv[1]) as table:
                ids = torch.tensor([5, 999, 5])
                rows = table.gather(ids, out=gpu.put_pageable(torch.zeros(3, 6)))
                assert torch.equal(gpu.read(rows), content[ids])
                assert table.stats().fallbacks[-1].kind == "unpinned"
                assert table.stats().device_bytes == 72
    """
    ended = run_on_driver(script, disk_path / "a", PENSTOCK_FAKE_PINNED_BYTES="0")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_nothing_is_left_behind(gpu, disk_path):
    content = written(disk_path / "a", torch.int16, width=2048)
    left = []
    for turn in range(4):
        with features.open(disk_path / "a", cache=features.Cache(4 * MIB)) as table:
            for seed in range(3):
                ids = ids_of(6000, seed)
                # Some results are never fetched, and some gathers fail.
                table.gather_async(ids, out=target(gpu, content, ids))
                out = target(gpu, content, ids)
                with contextlib.suppress(DeviceError):
                    gpu.fail("cuMemcpyHtoDAsync_v2", seed + 1)
                    table.gather(ids, out=out)
                gpu.mend()
        gc.collect()
        penstock._native.CachingHostAllocator(0, False).release()
        gpu.forget()
        found = gpu.leaks()
        if turn:
            left.append({kind: found[kind] for kind in ("registered", "streams", "events")})
    assert left[0] == left[1] == left[2]


def test_closing_waits_for_what_is_under_way(gpu, disk_path):
    content = written(disk_path / "a", torch.int16, width=2048)
    ids = ids_of(20_000)
    for _ in range(2):
        table = features.open(disk_path / "a", cache=features.Cache(4 * MIB))
        pending = table.gather_async(ids, device="cuda")
        table.close()
        assert pending.done()
        pending._check = lambda: None
        found = gpu.read(pending.result())
        assert same(found[:9000], content[ids[:9000]])
        assert same(found[-9000:], content[ids[-9000:]])
        gpu.forget()


def test_a_fork_reads_to_the_host_and_refuses_the_gpu(disk_path):
    script = """
        import os, sys, torch
        sys.path.insert(0, sys.argv[2])
        import penstock
        from penstock import features
        from gpu import taken_for_real
        # Threads of OpenMP do not live on in a fork.
        torch.set_num_threads(1)
        with taken_for_real() as gpu:
            content = torch.arange(6000.0).reshape(1000, 6)
            features.write(sys.argv[1], content)
            table = features.open(sys.argv[1])
            out = gpu.put(torch.zeros(3, 6))
            ids = torch.tensor([5, 999, 5])
            begun = table.gather_async(ids, out=out)
            begun.result()
            child = os.fork()
            if child == 0:
                try:
                    assert not begun.done()
                    for ask in (begun.result, lambda: table.gather(ids, out=out)):
                        try:
                            ask()
                        except penstock.PenstockError as error:
                            assert "fork" in str(error), error
                        else:
                            os._exit(7)
                    with features.open(sys.argv[1]) as mine:
                        assert torch.equal(mine.gather(ids), content[ids])
                        try:
                            mine.gather(ids, out=out)
                        except penstock.errors.DeviceError as error:
                            assert "fork" in str(error) and "spawn" in str(error), error
                        else:
                            os._exit(9)
                    table.close()
                    os._exit(0)
                except BaseException as error:
                    print(repr(error), flush=True)
                    os._exit(8)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
            assert torch.equal(gpu.read(table.gather(ids, out=out)), content[ids])
            table.close()
    """
    ended = run_on_driver(script, disk_path / "a")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_without_a_driver_pytorch_copies(disk_path):
    script = """
        import sys, torch
        sys.path.insert(0, sys.argv[2])
        from penstock import features
        from gpu import taken_for_real
        with taken_for_real() as gpu:
            content = torch.arange(6000.0).reshape(1000, 6)
            features.write(sys.argv[1], content)
            with features.open(sys.argv[1]) as table:
                ids = torch.tensor([5, 999, 5])
                out = gpu.put(torch.zeros(3, 6))
                pending = table.gather_async(ids, out=out)
                assert pending.result() is out
                assert torch.equal(gpu.read(out), content[ids])
                gpu.change(out, torch.zeros(3, 6))
                # It is not copied again.
                assert not gpu.read(pending.result()).any()
                assert torch.equal(gpu.read(table.gather(gpu.put(ids))), content[ids])
                assert torch.equal(gpu.read(table.gather([], device="cuda")), content[:0])
                for _, rows in table.stream([ids, ids], device="cuda"):
                    assert torch.equal(gpu.read(rows), content[ids])
                assert table.stats().device_bytes == 0
    """
    ended = run_on_driver(script, disk_path / "a", **{VARIABLE: "/nowhere/libcuda.so.1"})
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_result_is_not_given_away_while_another_stream_reads_it(gpu, disk_path):
    """Gathered on one stream, used on another and dropped: the allocator knows both streams."""
    content = written(disk_path / "a")
    used, side = gpu.stream, gpu.new_stream()
    with features.open(disk_path / "a") as table:
        gpu.stream = side
        pending = table.gather_async(ids_of(500, 1), device="cuda")
        gpu.stream = used
        rows = pending.result()
        gpu.call("cuStreamSynchronize", used)
        with gpu.holding(used):
            seen = gpu.look(rows)
            del rows, pending
            gc.collect()
            # Makes the engine release its references.
            table.gather([0])
            gpu.stream = side
            other = table.gather_async(ids_of(500, 2), device="cuda")
            gpu.call("cuStreamSynchronize", side)
            assert other._native.wait(60)
            time.sleep(0.05)
            gpu.stream = used
        assert same(seen(), content[ids_of(500, 1)])
