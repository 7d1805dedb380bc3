"""Rows of a mutable table go to a GPU and return from it, in the order of its stream."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import numpy as np
import pytest
import torch

from device.test_device_gather import device_error_of, run_on_driver
from gpu import drawn, is_refused_in_a_fork, same
from penstock.errors import CorruptCheckpointError, DeviceError
from penstock.features import Cache, Table

ROWS = 600
COLUMNS = {"weight": (64, "float32"), "step": ((), "int32"), "half": ((2, 3), "bfloat16")}

torch.set_num_threads(1)


def filled(path, **options):
    """Makes a table; returns it and the contents of its columns."""
    held = {
        "weight": drawn((ROWS, 64), torch.float32, 1),
        "step": drawn((ROWS,), torch.int32, 2),
        "half": drawn((ROWS, 2, 3), torch.bfloat16, 3),
    }
    return Table.create(path, ROWS, COLUMNS, init=[held], **options), held


def ids_of(count, seed=0):
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:count].clone()


def assert_rows(gpu, rows, held, ids):
    for name, column in rows.items():
        assert column.device == torch.device("cuda:0")
        assert same(gpu.read(column), held[name][ids]), name


@pytest.mark.parametrize("cached", [False, True])
def test_rows_go_where_they_are_asked_for(gpu, disk_path, cached):
    gpu.draw(4, 200)
    table, held = filled(disk_path / "t", cache=Cache(64 << 10) if cached else None)
    with table:
        for ids in (
            ids_of(200),
            ids_of(60, 1).reshape(3, 20),
            torch.tensor([7, 7, 599, 0, 7]),
            torch.tensor(5),
            torch.empty((2, 0), dtype=torch.int64),
        ):
            on_gpu = gpu.put(ids.flip(0) if ids.dim() else ids)
            # The lookup waits for ids that are still being written.
            gpu.change(on_gpu, ids)
            assert_rows(gpu, table.lookup(on_gpu), held, ids)
            for where in ("cuda", "cuda:0", torch.device("cuda", 0)):
                assert_rows(gpu, table.lookup(ids.tolist(), device=where), held, ids)
            assert_rows(gpu, table.lookup_async(ids.numpy(), device="cuda").result(), held, ids)
            for rows in (table.lookup(on_gpu, device="cpu"), table.lookup(ids)):
                assert rows["weight"].device.type == "cpu"
                assert same(rows["half"], held["half"][ids])
            assert isinstance(table.lookup(ids.numpy(), device="cpu")["step"], torch.Tensor)
            assert isinstance(table.lookup(ids.numpy())["step"], np.ndarray)
    # All rows are in pinned memory, and no thread waits for the copy.
    assert not gpu.waited


def test_what_is_changed_on_the_gpu_is_in_the_table_after_an_update(gpu, disk_path):
    """Training steps with random delays: the update waits for kernels that still write."""
    table, held = filled(disk_path / "t", cache=Cache(64 << 10), log_bytes=64 << 10)
    with table:
        for seed in range(20):
            gpu.draw(seed, 300)
            ids = ids_of(50, seed)
            on_gpu = gpu.put(ids) if seed % 2 else ids
            rows = table.lookup(on_gpu, device="cuda")
            new = {name: drawn((50, *one.shape[1:]), one.dtype, seed) for name, one in held.items()}
            if seed % 3:
                for name, value in new.items():
                    rows[name] = gpu.put(value) if seed % 3 == 1 else value
            else:
                rows = {"step": new["step"]} | {
                    name: gpu.put(torch.zeros_like(new[name])) for name in ("weight", "half")
                }
                for name in ("weight", "half"):
                    gpu.change(rows[name], new[name])
            table.update(on_gpu, rows)
            for name, value in new.items():
                held[name][ids] = value
            gpu.forget()
        table.flush()
        every = torch.arange(ROWS)
        assert_rows(gpu, table.lookup(every, device="cuda"), held, every)
    with Table(disk_path / "t") as table:
        assert same(table.lookup(every)["weight"], held["weight"])


def test_the_thread_waits_for_no_stream_and_the_stream_for_the_copy(gpu, disk_path):
    table, held = filled(disk_path / "t")
    ids = ids_of(300)
    with table:
        table.lookup(ids, device="cuda")
        with gpu.holding(gpu.stream):
            rows = table.lookup(ids, device="cuda")
            seen = gpu.look(rows.buffer)
            time.sleep(0.02)
        expected = table.lookup(ids).buffer
        assert same(seen(), expected)
        assert_rows(gpu, rows, held, ids)
    assert not gpu.waited


def test_rows_are_copied_once_and_other_streams_wait_for_it(gpu, disk_path):
    table, held = filled(disk_path / "t")
    ids = ids_of(300)
    first, second = gpu.stream, gpu.new_stream()
    with table:
        expected = table.lookup(ids).buffer
        pending = table.lookup_async(ids, device="cuda")
        pending._native.wait(60)
        before = gpu.calls("cuMemcpyHtoDAsync_v2")
        with gpu.holding(first):
            rows = pending.result()
            assert pending.result() is rows
            assert not rows.buffer.block.used_by
            gpu.stream = second
            assert pending.result() is rows
            seen = gpu.look(rows.buffer)
            # Long enough for a copy that would not wait.
            time.sleep(0.3)
        assert same(seen(), expected)
        assert gpu.calls("cuMemcpyHtoDAsync_v2") == before + 1
        # The allocator knows both streams.
        assert rows.buffer.block.used_by == [second.value]
        gpu.stream = first
        pending = table.lookup_async(ids, device="cuda")
        found = []
        threads = [threading.Thread(target=lambda: found.append(pending.result())) for _ in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        assert all(one is found[0] for one in found)
        assert_rows(gpu, found[0], held, ids)
        assert gpu.calls("cuMemcpyHtoDAsync_v2") == before + 2

        async def awaited():
            return await table.lookup_async(ids, device="cuda")

        assert_rows(gpu, asyncio.run(awaited()), held, ids)
    assert not gpu.waited


def test_rows_that_are_dropped_are_read_into_memory_that_is_theirs(gpu, disk_path):
    table, held = filled(disk_path / "t")
    with table:
        for seed in range(20):
            table.lookup_async(ids_of(300, seed), device="cuda")
            gc.collect()
        ids = ids_of(100)
        assert_rows(gpu, table.lookup(ids, device="cuda"), held, ids)


def test_ids_of_a_gpu_are_read_into_the_cache(gpu, disk_path):
    table, held = filled(disk_path / "t", cache=Cache(512 << 10))
    ids = ids_of(100)
    with table:
        # The first use of a device tries a copy.
        table.lookup([], device="cuda")
        on_gpu = gpu.put(ids)
        before = gpu.calls("cuMemcpyHtoDAsync_v2")
        table.prefetch(on_gpu)
        for pending in table._prefetches:
            pending.result()
        assert table.stats().read_rows == 100
        assert_rows(gpu, table.lookup(ids, device="cuda"), held, ids)
        assert table.stats().read_rows == 100
        assert gpu.calls("cuMemcpyHtoDAsync_v2") == before + 1


def test_what_does_not_fit_is_refused(gpu, disk_path):
    table, held = filled(disk_path / "t")
    with table:
        for device in ("nowhere", "meta", 3.5):
            with pytest.raises(ValueError, match="device="):
                table.lookup([1], device=device)
        for ids in (gpu.put(torch.tensor([1, ROWS])), [1, ROWS]):
            with pytest.raises(IndexError, match=r"ids\[1\]"):
                table.lookup(ids, device="cuda")
        with pytest.raises(TypeError, match="use integers"):
            table.lookup(gpu.put(torch.ones(3)))
        rows = table.lookup(gpu.put(ids_of(4)))
        with pytest.raises(ValueError, match="ids have"):
            table.update(gpu.put(ids_of(5)), rows)
        with pytest.raises(ValueError, match="'step'"):
            table.update(ids_of(4), {**rows, "step": gpu.put(torch.zeros(4))})
        every = torch.arange(ROWS)
        assert_rows(gpu, table.lookup(every, device="cuda"), held, every)
    with pytest.raises(ValueError, match="closed"):
        table.lookup([1], device="cuda")


def test_in_a_capture_all_is_refused_and_the_capture_goes_on(gpu, disk_path):
    table, held = filled(disk_path / "t", cache=Cache(512 << 10))
    ids = ids_of(40)
    with table:
        on_gpu, rows = gpu.put(ids), table.lookup(ids, device="cuda")
        columns = {name: gpu.put(one[ids]) for name, one in held.items()}
        begun = table.lookup_async(ids, device="cuda")
        begun._native.wait(60)
        gpu.forget()
        with gpu.capturing():
            for ask in (
                lambda: table.lookup(on_gpu),
                lambda: table.lookup(ids, device="cuda"),
                lambda: table.lookup_async(ids, device="cuda"),
                lambda: table.prefetch(on_gpu),
                lambda: table.update(on_gpu, table.lookup(ids)),
                lambda: table.update(ids, rows),
                lambda: table.update(ids, columns),
                begun.result,
            ):
                with pytest.raises(DeviceError, match="outside of the capture") as caught:
                    ask()
                assert caught.value.code is None
        assert_rows(gpu, begun.result(), held, ids)
        table.update(on_gpu, rows)
        assert_rows(gpu, table.lookup(on_gpu), held, ids)


def test_damage_never_reaches_the_gpu(gpu, disk_path):
    table, held = filled(disk_path / "t")
    with table:
        table.flush()
        pieces = [path for path in (disk_path / "t").iterdir() if path.stat().st_size > 10_000]
        assert len(pieces) == 1
        content = pieces[0].read_bytes()
        at = content.index(held["weight"][300].numpy().tobytes())
        with open(pieces[0], "r+b") as file:
            file.seek(at + 5)
            file.write(b"\xff\0damage\0\xff")
        pending = table.lookup_async(torch.arange(200, 400), device="cuda")
        before = gpu.calls("cuMemcpyHtoDAsync_v2")
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError, match="damaged"):
                pending.result()
        assert gpu.calls("cuMemcpyHtoDAsync_v2") == before
        ids = torch.arange(100)
        assert_rows(gpu, table.lookup(ids, device="cuda"), held, ids)


@pytest.mark.parametrize(
    "name", ["cuStreamIsCapturing", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"]
)
def test_each_call_that_fails_is_told_and_may_be_tried_again(gpu, disk_path, name):
    table, held = filled(disk_path / "t")
    ids, first = ids_of(100), gpu.stream
    with table:
        told = 0
        for nth in range(1, 6):
            gpu.stream = first
            pending = table.lookup_async(ids, device="cuda")
            gpu.fail(name, nth)

            def asked(pending=pending):
                gpu.stream = first
                pending.result()
                gpu.stream = gpu.new_stream()
                pending.result()

            error = device_error_of(asked)
            gpu.mend()
            if error is not None:
                told += 1
                assert error.code == 999
                assert name in str(error)
            assert_rows(gpu, pending.result(), held, ids)
            gpu.fail(name, nth)
            error = device_error_of(lambda: table.update(gpu.put(ids), table.lookup(ids)))
            gpu.mend()
            assert error is None or name in str(error)
            gpu.forget()
        assert told > 0
        assert_rows(gpu, table.lookup(ids, device="cuda"), held, ids)


def test_where_pytorch_can_pin_nothing_rows_come_all_the_same(gpu, disk_path, monkeypatch):
    table, held = filled(disk_path / "t")
    ids = ids_of(100)
    empty = torch.empty

    def refused(*shape, pin_memory=False, **keywords):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **keywords)

    with table:
        monkeypatch.setattr(torch, "empty", refused)
        pending = table.lookup_async(ids, device="cuda")
        assert_rows(gpu, pending.result(), held, ids)
        gpu.stream = gpu.new_stream()
        assert_rows(gpu, pending.result(), held, ids)
        assert pending.rows.buffer.block.used_by == [gpu.stream.value]
        assert len(gpu.waited) == 1


def test_without_a_driver_pytorch_copies(disk_path):
    script = """
        import sys, torch
        sys.path.insert(0, sys.argv[2])
        from penstock.features import Table
        from gpu import taken_for_real
        with taken_for_real() as gpu:
            content = torch.arange(6000.0).reshape(1000, 6)
            with Table.create(sys.argv[1], 1000, {"x": (6, "float32")}) as table:
                ids = torch.tensor([5, 999, 7])
                table.update(gpu.put(ids), {"x": gpu.put(content[ids])})
                pending = table.lookup_async(gpu.put(ids))
                assert pending.result() is pending.result()
                assert torch.equal(gpu.read(pending.result()["x"]), content[ids])
                assert len(gpu.waited) == 1
                rows = table.lookup(ids, device="cuda")
                rows["x"] = gpu.put(content[:3])
                table.update(ids, rows)
                assert torch.equal(table.lookup(ids)["x"], content[:3])
    """
    ended = run_on_driver(script, disk_path / "a", PENSTOCK_CUDA_DRIVER="/nowhere/libcuda.so.1")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_fork_is_refused(gpu, disk_path):
    table, held = filled(disk_path / "t")
    ids = ids_of(10)
    with table:
        rows = table.lookup(ids, device="cuda")
        begun = table.lookup_async(ids, device="cuda")
        begun._native.wait(60)
        assert is_refused_in_a_fork(
            begun.result,
            lambda: table.lookup(ids, device="cuda"),
            lambda: table.update(ids, rows),
        )
        assert_rows(gpu, begun.result(), held, ids)
