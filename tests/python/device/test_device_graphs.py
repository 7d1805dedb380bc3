"""Graph batches are on a GPU when its stream needs them; another thread gathers ahead."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import ExitStack

import pytest
import torch

import forks
from device.test_device_gather import device_error_of, run_on_driver
from gpu import THREAD_LOCAL, VARIABLE, GpuTensor, drawn, is_refused_in_a_fork, same
from penstock import features
from penstock.errors import CorruptCheckpointError, DeviceError
from penstock.integrations.pyg import FeatureStore, GatherLoader, Graph

NODES, WIDTH = 900, 64
BATCHES = 20

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def graph():
    generator = torch.Generator().manual_seed(3)
    return Graph(torch.randint(0, NODES, (2, 6000), generator=generator), NODES)


@pytest.fixture
def table(gpu, disk_path):
    """Opens a table; its rows; threads have streams of their own, like PyTorch's."""
    gpu.others = gpu.new_stream()
    rows = drawn((NODES, WIDTH), torch.float32)
    features.write(disk_path / "x", rows)
    with features.open(disk_path / "x", cache=features.Cache(64 << 10)) as opened:
        yield opened, rows


def loader_of(opened, graph, **settings):
    settings = {"batch_size": 16, "shuffle": True, "seed": 5, "device": "cuda", **settings}
    store = FeatureStore({"x": opened, "y": torch.arange(NODES)})
    return GatherLoader(store, graph, [3, 2], torch.arange(16 * BATCHES), **settings)


def assert_same(gpu, found, wanted):
    """Checks that a batch is on the device and equals a batch of the host."""
    assert sorted(found.keys()) == sorted(wanted.keys())
    for store, other in zip(found.stores, wanted.stores, strict=True):
        for name, value in store.items():
            if isinstance(value, torch.Tensor):
                assert type(value) is GpuTensor
                assert value.device == torch.device("cuda:0")
                assert same(gpu.read(value), other[name]), name
            else:
                assert value == other[name]


def is_clean(loader):
    gc.collect()
    threads = [one for one in threading.enumerate() if one.name == "penstock-sample"]
    return not threads and not loader.store._ahead


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_batches_are_those_of_the_host(gpu, table, graph, workers, device):
    opened, _ = table
    wanted = list(loader_of(opened, graph, device=None))
    gpu.draw(workers, 300)
    before = opened.stats().device_bytes
    loader = loader_of(opened, graph, num_workers=workers, device=device)
    count = 0
    for found, batch in zip(loader, wanted, strict=True):
        assert_same(gpu, found, batch)
        assert type(found.batch_size) is int
        # In memory of the training's own stream, to which it returns at once.
        assert not found.x.block.used_by
        count += len(batch.n_id)
    # Copied from pinned memory directly: PyTorch moved no tensor, and the host did not wait.
    assert opened.stats().device_bytes == before + count * 4 * WIDTH
    assert not gpu.waited
    assert is_clean(loader)


def test_rows_come_after_what_the_stream_has_and_no_thread_waits(gpu, table, graph):
    opened, rows = table
    loader = loader_of(opened, graph)
    wanted = list(loader_of(opened, graph, device=None))
    with gpu.holding(gpu.stream):
        epoch = iter(loader)
        seen = []
        for _ in range(4):
            batch = next(epoch)
            seen.append((gpu.look(batch.x), gpu.look(batch.y), gpu.look(batch.edge_index)))
        del batch
        # A copy that waited for another stream would be done by now.
        time.sleep(0.3)
    for (x, y, edges), batch in zip(seen, wanted, strict=False):
        assert same(x(), rows[batch.n_id])
        assert same(y(), batch.n_id)
        assert same(edges(), batch.edge_index)
    for batch, other in zip(epoch, wanted[4:], strict=True):
        assert_same(gpu, batch, other)
    assert not gpu.waited


def test_another_stream_that_asks_for_batches_has_them(gpu, table, graph):
    """Begun on one stream, used on another and dropped: the allocator knows both streams."""
    opened, rows = table
    wanted = list(loader_of(opened, graph, device=None))
    first, used = gpu.stream, gpu.new_stream()
    epoch = iter(loader_of(opened, graph))
    seen = []
    with gpu.holding(used):
        gpu.stream = used
        for _ in range(10):
            batch = next(epoch)
            assert batch.x.block.used_by == [used.value]
            seen.append(gpu.look(batch.x))
            del batch
            gc.collect()
        time.sleep(0.05)
    for look, batch in zip(seen, wanted, strict=False):
        assert same(look(), rows[batch.n_id])
    gpu.stream = first
    for batch, other in zip(epoch, wanted[10:], strict=True):
        assert_same(gpu, batch, other)


def test_a_transform_sees_the_batch_on_the_device(gpu, table, graph):
    opened, rows = table
    asked = []

    def transform(batch):
        asked.append({name: value.device.type for name, value in batch if hasattr(value, "device")})
        return gpu.read(batch.n_id), batch.x

    for nodes, x in loader_of(opened, graph, transform=transform):
        assert same(gpu.read(x), rows[nodes])
    assert len(asked) == BATCHES
    for found in asked:
        assert {"x", "y", "n_id", "e_id", "edge_index", "input_id"} <= found.keys()
        assert set(found.values()) == {"cuda"}
    loader = loader_of(opened, graph, transform=transform)
    nodes, x = loader([3, 4])
    assert same(gpu.read(x), rows[nodes])


def test_graphs_of_several_types(gpu, disk_path):
    sizes = {"paper": (NODES, 32), "author": (300, 32), "topic": (20, 8)}
    gpu.others = gpu.new_stream()
    small = features.Cache(60 * 192)
    held, want = {("paper", "y"): torch.arange(NODES)}, {}
    with ExitStack() as stack:
        for name, (count, width) in sizes.items():
            want[name] = drawn((count, width), torch.float32, count)
            features.write(disk_path / name, want[name])
            cache = small if width == 32 else None
            held[name, "x"] = stack.enter_context(features.open(disk_path / name, cache=cache))
        generator = torch.Generator().manual_seed(1)
        kinds = ("paper", "cites", "paper"), ("author", "of", "paper"), ("topic", "in", "author")
        edges = {
            kind: torch.stack(
                [
                    torch.randint(0, sizes[one][0], (4000,), generator=generator)
                    for one in (kind[0], kind[2])
                ]
            )
            for kind in kinds
        }
        graph = Graph(edges, {name: count for name, (count, _) in sizes.items()})

        def made(**settings):
            nodes = "paper", torch.arange(200)
            return GatherLoader(FeatureStore(held), graph, [3, 2], nodes, batch_size=20, **settings)

        wanted = list(made())
        gpu.draw(3, 200)
        loader = made(device="cuda", window=3)
        for found, batch in zip(loader, wanted, strict=True):
            assert_same(gpu, found, batch)
            for name, rows in want.items():
                assert same(gpu.read(found[name].x), rows[batch[name].n_id])
        assert is_clean(loader)
        assert not gpu.waited


def test_the_state_is_that_of_the_host(gpu, table, graph):
    opened, _ = table
    host, loader = loader_of(opened, graph, device=None), loader_of(opened, graph)
    wanted = list(host)
    epoch = iter(loader)
    for _ in range(7):
        next(epoch)
    state = loader.state_dict()
    assert set(state) == set(host.state_dict())
    del epoch
    assert is_clean(loader)
    for device in ("cuda", None):
        resumed = loader_of(opened, graph, device=device)
        resumed.load_state_dict(state)
        found = list(resumed)
        assert len(found) == len(wanted) - 7
        for batch, other in zip(found, wanted[7:], strict=True):
            if device is not None:
                assert_same(gpu, batch, other)
            else:
                assert same(batch.x, other.x)


def test_where_no_gpu_is_asked_for_none_is(gpu, table, graph):
    opened, rows = table
    asked = len(gpu.asked)
    for device in (None, "cpu", torch.device("cpu")):
        for batch in loader_of(opened, graph, device=device):
            assert same(batch.x, rows[batch.n_id])
    assert len(gpu.asked) == asked
    for device in ("nowhere", "meta", 3.5):
        with pytest.raises(ValueError, match="device="):
            loader_of(opened, graph, device=device)


def test_a_capture_of_the_epoch_s_own_stream_leaves_the_epoch_as_it_is(gpu, table, graph):
    """Its thread begins batches on that stream, and cannot do so during the capture."""
    opened, _ = table
    wanted = list(loader_of(opened, graph, device=None))
    loader = loader_of(opened, graph)

    def slowly(one):
        time.sleep(0.05)
        return one

    loader._transform_sampled = slowly
    epoch = iter(loader)
    found = [next(epoch)]
    with gpu.capturing(THREAD_LOCAL):
        # Samples the next batches, and begins one of them.
        time.sleep(0.3)
    found += epoch
    for batch, other in zip(found, wanted, strict=True):
        assert_same(gpu, batch, other)


def test_a_capture_is_refused_and_goes_on_and_so_does_the_epoch(gpu, table, graph):
    opened, _ = table
    wanted = list(loader_of(opened, graph, device=None))
    loader = loader_of(opened, graph)
    epoch, found = iter(loader), []
    found.append(next(epoch))
    stream, gpu.stream = gpu.stream, gpu.new_stream()
    # The epoch's thread allocates memory during the capture.
    with gpu.capturing(THREAD_LOCAL):
        for ask in (lambda: next(epoch), lambda: iter(loader), lambda: loader([1])):
            with pytest.raises(DeviceError, match="outside of the capture") as caught:
                ask()
            assert caught.value.code is None
    gpu.stream = stream
    found += epoch
    for batch, other in zip(found, wanted, strict=True):
        assert_same(gpu, batch, other)
    assert is_clean(loader)


CALLS = ["cuStreamIsCapturing", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"]


@pytest.mark.parametrize("name", CALLS)
def test_a_driver_that_fails_is_told_and_leaves_nothing(gpu, table, graph, name):
    opened, _ = table
    wanted = list(loader_of(opened, graph, device=None))
    told = 0
    for nth in (1, 2, 3, 5, 9, 20):
        loader, found = loader_of(opened, graph), []
        gpu.fail(name, nth)
        error = device_error_of(lambda loader=loader, found=found: found.extend(loader))
        gpu.mend()
        gc.collect()
        if error is not None:
            told += 1
            assert error.code == 999
            assert name in str(error)
            # The error's traceback refers to the loader.
            del error
            assert is_clean(loader)
        else:
            assert len(found) == BATCHES
        for batch, other in zip(found, wanted, strict=False):
            assert_same(gpu, batch, other)
    assert told > 0
    assert len(list(loader_of(opened, graph))) == BATCHES


def test_a_thread_that_cannot_work_on_the_stream_says_so(gpu, table, graph, monkeypatch):
    loader = loader_of(table[0], graph)

    def refused(stream):
        raise RuntimeError("CUDA error: no stream")

    monkeypatch.setattr(torch.cuda, "stream", refused)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no stream"):
            next(iter(loader))
        assert is_clean(loader)
    monkeypatch.undo()


def test_damage_comes_in_its_turn(gpu, table, graph):
    opened, rows = table
    loader = loader_of(opened, graph, shuffle=False, transform_sampler_output=_with_far_node)
    found = []
    with pytest.raises(IndexError, match=f"rows 0 to {NODES - 1}"):
        found.extend(loader)
    gc.collect()
    assert is_clean(loader)
    segment = opened.source.segments[0]
    with open(segment.path, "r+b") as file:
        file.seek(segment.offset + 80 * 4 * WIDTH + 9)
        file.write(b"\xff\0damage\0\xff")
    # Accepts the new modification time, so that only the checksum can find the damage.
    marks = opened._files._marks
    marks.accept(segment.path, marks.inspect(segment.path)[1])
    with features.open(opened.source.path) as damaged:
        loader = loader_of(damaged, graph, shuffle=False)
        found = []
        with pytest.raises(CorruptCheckpointError, match="is damaged"):
            found.extend(loader)
        assert is_clean(loader)
        for batch in found:
            nodes = gpu.read(batch.n_id)
            assert not (nodes == 80).any()
            assert same(gpu.read(batch.x), rows[nodes])


def _with_far_node(sampled):
    if 32 in sampled.node.tolist()[:16]:
        sampled.node = torch.cat([sampled.node, torch.tensor([NODES])])
    return sampled


@pytest.mark.parametrize("left_after", [1, 5])
def test_an_epoch_that_is_left_leaves_nothing(gpu, table, graph, left_after):
    opened, rows = table
    for seed in range(3):
        gpu.draw(seed, 300)
        loader = loader_of(opened, graph)
        for number, _ in enumerate(loader, 1):
            if number == left_after:
                break
        assert is_clean(loader)
        every = torch.arange(NODES)
        assert same(gpu.read(opened.gather(every, device="cuda")), rows)
        gpu.forget()


def test_a_store_gives_what_ids_of_the_gpu_ask_for_there(gpu, table):
    opened, rows = table
    store = FeatureStore({"x": opened, "y": torch.arange(NODES)})
    ids = torch.randint(NODES, (40,), generator=torch.Generator().manual_seed(2))
    on_gpu = gpu.put(ids.flip(0))
    gpu.change(on_gpu, ids)
    x, y = (store.get_tensor(group_name=None, attr_name=one, index=on_gpu) for one in "xy")
    assert (x.device.type, y.device.type) == ("cuda", "cuda")
    assert same(gpu.read(x), rows[ids])
    assert same(gpu.read(y), ids)
    assert same(store.get_tensor(group_name=None, attr_name="y", index=ids), ids)
    with gpu.capturing():
        for name in "xy":
            with pytest.raises(DeviceError, match="outside of the capture"):
                store.get_tensor(group_name=None, attr_name=name, index=on_gpu)


def test_without_a_driver_pytorch_copies(disk_path):
    script = """
        import sys, torch
        sys.path.insert(0, sys.argv[2])
        from penstock import features
        from penstock.integrations.pyg import FeatureStore, GatherLoader, Graph
        from gpu import taken_for_real
        with taken_for_real() as gpu:
            content = torch.arange(6000.0).reshape(1000, 6)
            features.write(sys.argv[1], content)
            graph = Graph(torch.randint(0, 1000, (2, 6000)), 1000)
            with features.open(sys.argv[1]) as table:
                store = FeatureStore({"x": table, "y": torch.arange(1000)})
                nodes = torch.arange(60)
                for batch in GatherLoader(store, graph, [2], nodes, batch_size=20, device="cuda"):
                    assert batch.x.device == batch.edge_index.device == torch.device("cuda:0")
                    assert torch.equal(gpu.read(batch.x), content[gpu.read(batch.n_id)])
                assert table.stats().device_bytes == 0
    """
    variables = {VARIABLE: "/nowhere/libcuda.so.1"}
    ended = run_on_driver(script, disk_path / "a", forks.GraphPopen, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_fork_is_refused(gpu, table, graph):
    opened, _ = table
    loader = loader_of(opened, graph)
    epoch = iter(loader)
    next(epoch)
    assert is_refused_in_a_fork(lambda: next(epoch), lambda: next(epoch), lambda: iter(loader))
    assert len(list(epoch)) == BATCHES - 1
