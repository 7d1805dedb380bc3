"""The tests of `tests/python/device` on a real GPU with PyTorch, not on the driver for tests.

Run it with `make test-gpu`, in a process where nothing uses the driver for tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import torch

import penstock
from penstock import features, offload
from penstock.errors import DeviceError, StateMismatchError

if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

MIB = 1 << 20
DEVICE = torch.device("cuda:0")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def drawn(shape, dtype=torch.float32, seed=0):
    """Returns a tensor on the GPU whose bytes differ from place to place."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype).to(DEVICE)
    nbytes = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
    # Excludes exponents of all ones, as NaN does not equal itself.
    raw = torch.randint(0, 60, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape).to(DEVICE)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def layouts(dtype):
    base = drawn((12, 10, 7), dtype)
    return {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "rows": base[2:9],
        "columns": base[:, 3:8],
        "long rows": drawn((6, 1200), dtype, 4)[:, 100:1000],
        "steps": base[::3, :, ::2],
        "inner": base.permute(2, 0, 1)[1:5],
        "expanded": drawn((5, 1, 4), dtype, 1).expand(5, 6, 4),
        "one": drawn((1, 1), dtype, 3),
        "empty": torch.empty((3, 0, 2), dtype=dtype, device=DEVICE),
        "large": drawn((3, MIB), dtype, 5),
    }


def same(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    one, other = one.cpu().contiguous().reshape(-1), other.cpu().contiguous().reshape(-1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def busy(stream=None, seconds=0.05):
    """Keeps a stream busy for a while."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(int(seconds * 1.5e9))


def child(script, *arguments, **environment):
    """Runs a script in a process of its own; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class TestSave:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_and_layout_comes_back(self, tmp_path, dtype):
        state = layouts(dtype)
        report = penstock.save(tmp_path / "a", state)
        assert report.device_bytes >= 3 * MIB * dtype.itemsize
        assert "unpinned" not in [one.kind for one in report.fallbacks]
        for loaded in (
            penstock.load(tmp_path / "a"),
            penstock.load(tmp_path / "a", device="cuda"),
        ):
            for name, tensor in state.items():
                assert same(loaded[name], tensor), name
        assert all(tensor.device == DEVICE for tensor in loaded.values())
        names = [name for name in state if name != "expanded"]
        targets = {name: torch.zeros_like(state[name]) for name in names}
        targets["transposed"] = torch.zeros_like(state["whole"]).transpose(0, 2)
        targets["columns"] = torch.zeros_like(state["whole"])[:, 3:8]
        penstock.load(tmp_path / "a", into=targets, keys=names)
        for name in names:
            assert same(targets[name], state[name]), name

    @pytest.mark.parametrize("staging_bytes", [None, 8 * MIB])
    @pytest.mark.parametrize("lazy", [False, True])
    def test_what_is_queued_afterwards_tears_nothing(self, tmp_path, lazy, staging_bytes):
        state = {f"t{number}": drawn((2 * MIB,), seed=number) for number in range(16)}
        state |= {f"s{number}": drawn((100,), seed=number) for number in range(64)}
        side = torch.cuda.Stream()
        options = penstock.Options(staging_bytes=staging_bytes)
        with penstock.CheckpointStore(tmp_path / "store", options=options) as store:
            for step in range(12):
                stream = side if step % 3 == 2 else torch.cuda.current_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    busy()
                    for number, tensor in enumerate(state.values()):
                        tensor.fill_(100.0 * step + number)
                    pending = store.save_async(step, state, lazy=lazy)
                    pending.hold()
                    for tensor in state.values():
                        tensor.fill_(-1.0)
                pending.result()
                torch.cuda.current_stream().wait_stream(stream)
                loaded = store.load(step)
                for number, name in enumerate(state):
                    assert (loaded[name] == 100.0 * step + number).all(), (step, name)

    @pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
    def test_optimizers_step_while_a_lazy_save_writes(self, tmp_path, options):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        penstock.guard(optimizer)
        x = torch.randn(64, 1024, device=DEVICE)

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with penstock.CheckpointStore(tmp_path / "store") as store:
            for number in range(10):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                flat = [value.clone() for value in state["model"].values()]
                moments = [one["exp_avg_sq"].clone() for one in optimizer.state.values()]
                pending = store.save_async(number, state, lazy=True)
                step()
                step()
                pending.result()
                loaded = store.load(number)
                assert all(map(same, loaded["model"].values(), flat))
                stored = [one["exp_avg_sq"] for one in loaded["optimizer"]["state"].values()]
                assert all(map(same, stored, moments))

    def test_a_change_that_nobody_announced_is_told(self, tmp_path):
        state = {"a": drawn((8 * MIB,))}
        busy(seconds=0.3)
        with penstock.CheckpointStore(tmp_path / "store") as store:
            pending = store.save_async(1, state, lazy=True)
            state["a"].fill_(3)
            with pytest.raises(StateMismatchError):
                pending.result()

    def test_tensors_that_are_let_go_of_are_stored(self, tmp_path):
        state = {"a": drawn((8 * MIB,), seed=3)}
        expected = state["a"].cpu()
        with penstock.CheckpointStore(tmp_path / "store") as store:
            busy()
            pending = store.save_async(1, state, lazy=True)
            state.clear()
            again = [torch.full((8 * MIB,), 5.0, device=DEVICE) for _ in range(4)]
            pending.result()
            assert same(store.load(1)["a"], expected)
            del again

    def test_a_save_under_capture_is_refused_and_a_capture_beside_one_is_not_voided(self, tmp_path):
        state = {"a": drawn((8 * MIB,))}
        values = torch.ones(1000, device=DEVICE)
        penstock.save(tmp_path / "c", state)
        with penstock.CheckpointStore(tmp_path / "store") as store:
            for number in range(20):
                pending = store.save_async(number, state, lazy=number % 2 == 0)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    doubled = values * 2
                    if number % 4 == 0:
                        with pytest.raises(DeviceError, match="captur"):
                            penstock.save(tmp_path / "b", state)
                        with pytest.raises(DeviceError, match="captur"):
                            penstock.load(tmp_path / "c", device="cuda")
                graph.replay()
                assert (doubled == 2).all()
                pending.result()

    def test_a_fork_is_refused_and_tensors_of_the_host_are_saved(self, tmp_path):
        script = """
import os, sys, torch, penstock
state = {"a": torch.ones(1 << 20, device="cuda")}
penstock.save(sys.argv[1] + "/first", state)
child = os.fork()
if not child:
    try:
        penstock.save(sys.argv[1] + "/second", state)
    except penstock.errors.DeviceError as error:
        penstock.save(sys.argv[1] + "/host", {"a": torch.ones(1 << 20)})
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
penstock.save(sys.argv[1] + "/third", state)
assert bool((penstock.load(sys.argv[1] + "/third")["a"] == 1).all())
print("done")
"""
        assert child(script, tmp_path) == "done\n"

    def test_a_process_that_ends_at_once_has_saved(self, tmp_path):
        script = """
import sys, torch, penstock
state = {"a": torch.ones(64 << 20, device="cuda")}
store = penstock.CheckpointStore(sys.argv[1])
store.save_async(1, state, lazy=True)
"""
        child(script, tmp_path / "store")
        with penstock.CheckpointStore(tmp_path / "store") as store:
            assert (store.load(1)["a"] == 1).all()

    def test_an_ordinary_user_with_little_memory_to_lock_saves_by_pinned_memory(self):
        script = """
import os, resource, sys, torch, penstock
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if not os.getuid():
    os.chmod(sys.argv[1], 0o777)
    os.setgid(65534)
    os.setuid(65534)
state = {"a": torch.ones(64 << 20, device="cuda")}
report = penstock.save(sys.argv[1] + "/a", state)
loaded = penstock.load(sys.argv[1] + "/a", device="cuda")
assert bool((loaded["a"] == 1).all())
print(report.device_bytes, "unpinned" in [one.kind for one in report.fallbacks])
"""
        # Other users cannot enter pytest's directories.
        with tempfile.TemporaryDirectory() as place:
            assert child(script, place, HOME=place) == f"{256 * MIB} False\n"


class TestRows:
    @pytest.mark.parametrize("width", [16, 250, 1024])
    @pytest.mark.parametrize("cached", [False, True])
    def test_rows_arrive_whichever_way_they_are_asked_for(self, tmp_path, cached, width):
        rows = drawn((20_000, width), seed=width)
        features.write(tmp_path / "table", rows.cpu())
        cache = features.Cache(4000 * width * 4) if cached else None
        with features.open(tmp_path / "table", cache=cache) as table:
            for count in (1, 31, 1000, 30_000):
                ids = torch.randint(20_000, (count,), generator=seeded(count))
                on_gpu = ids.to(DEVICE)
                assert same(table.gather(ids, device="cuda"), rows[on_gpu])
                busy()
                out = torch.zeros((count, width), device=DEVICE)
                table.gather(on_gpu, out=out)
                assert same(out, rows[on_gpu])
                out.fill_(-1)
                table.gather(ids, out=out)
                assert same(out, rows[on_gpu])

    @pytest.mark.parametrize("width", [16, 250, 1024])
    @pytest.mark.parametrize("cached", [False, True])
    def test_kernels_ask_for_rows(self, tmp_path, cached, width):
        rows = drawn((20_000, width), seed=width)
        features.write(tmp_path / "table", rows.cpu())
        cache = features.Cache(4000 * width * 4) if cached else None
        with (
            features.open(tmp_path / "table", cache=cache) as table,
            table.on_device("cuda:0") as served,
        ):
            for count in (1, 31, 32, 1000, 30_000):
                ids = torch.randint(20_000, (count,), device=DEVICE)
                found = served.gather(ids)
                assert same(found, rows[ids])
            many = [torch.randint(20_000, (777,), device=DEVICE) for _ in range(50)]
            results = [served.gather(ids) for ids in many]
            for ids, found in zip(many, results, strict=True):
                assert same(found, rows[ids])
            served.check()
            served.gather(torch.full((40,), 20_001, device=DEVICE))
            torch.cuda.synchronize()
            with pytest.raises(IndexError, match="20001"):
                served.check()

    def test_kernels_of_users_ask_for_rows(self, tmp_path):
        cupy = pytest.importorskip("cupy")
        rows = drawn((5000, 256), seed=1)
        features.write(tmp_path / "table", rows.cpu())
        text = documented_kernel()
        (tmp_path / "fifo.cuh").write_text(features.cuda_header())
        module = cupy.RawModule(code=text, options=(f"-I{tmp_path}", "-default-device"))
        kernel = module.get_function("sums")
        with (
            features.open(tmp_path / "table") as table,
            table.on_device("cuda:0") as served,
            served.serving(),
        ):
            ids = torch.randint(5000, (3001,), device=DEVICE)
            found = torch.zeros((3001, 256), device=DEVICE)
            sums = torch.zeros(3001, device=DEVICE)
            torch.cuda.synchronize()
            stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
            with stream:
                where = (
                    np.uint64(served.address),
                    np.uint64(ids.data_ptr()),
                    np.uint32(3001),
                    np.uint64(found.data_ptr()),
                    np.uint64(sums.data_ptr()),
                )
                kernel((4,), (128,), where)
            torch.cuda.synchronize()
            assert same(found, rows[ids])
            assert torch.allclose(sums, rows[ids].sum(1), rtol=1e-4)

    def test_a_capture_of_a_gather_is_refused(self, tmp_path):
        features.write(tmp_path / "table", torch.ones(1000, 32))
        with (
            features.open(tmp_path / "table") as table,
            table.on_device("cuda:0") as served,
        ):
            ids = torch.arange(100, device=DEVICE)
            values = torch.ones(10, device=DEVICE)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                more = values + 1
                with pytest.raises(DeviceError, match="captur"):
                    served.gather(ids)
            graph.replay()
            assert (more == 2).all()
            assert (served.gather(ids) == 1).all()


def documented_kernel():
    """Returns the kernel of docs/gpu.md."""
    page = os.path.join(os.path.dirname(__file__), "../../docs/gpu.md")
    with open(page) as file:
        return file.read().split("```cuda\n")[1].split("```")[0]


class TestTables:
    """Mutable tables."""

    COLUMNS = {"weight": (64, "float32"), "moment": ((), "float32")}  # noqa: RUF012

    @pytest.mark.parametrize("cached", [False, True])
    def test_a_training_on_the_gpu_is_that_of_the_host(self, tmp_path, cached):
        weights = torch.zeros((5000, 64))
        cache = features.Cache(1 << 20) if cached else None
        side = torch.cuda.Stream()
        with features.Table.create(tmp_path / "table", 5000, self.COLUMNS, cache=cache) as table:
            for step in range(30):
                ids = torch.randperm(5000, generator=seeded(step))[:1500]
                given = ids.to(DEVICE) if step % 2 else ids
                stream = side if step % 3 == 2 else torch.cuda.current_stream()
                with torch.cuda.stream(stream):
                    pending = table.lookup_async(given, device="cuda")
                    busy()
                    rows = pending.result()
                    assert rows["weight"].device == DEVICE
                    busy(seconds=0.01)
                    rows["weight"] += step
                    rows["moment"] = torch.full((1500,), float(step), device=DEVICE)
                    if step % 4:
                        table.update(given, rows)
                    else:
                        table.update(given, dict(rows))
                weights[ids] += step
            table.flush()
            every = torch.arange(5000)
            assert same(table.lookup(every)["weight"], weights)
            assert same(table.lookup(every.to(DEVICE))["weight"], weights)

    def test_a_second_stream_waits_for_the_copy(self, tmp_path):
        content = drawn((20_000, 64), seed=3).cpu()
        moments = torch.zeros(20_000)
        init = [{"weight": content, "moment": moments}]
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with features.Table.create(tmp_path / "table", 20_000, self.COLUMNS, init=init) as table:
            for _ in range(10):
                pending = table.lookup_async(torch.arange(20_000), device="cuda")
                busy(first)
                with torch.cuda.stream(first):
                    pending.result()
                with torch.cuda.stream(second):
                    found = pending.result()["weight"].clone()
                second.synchronize()
                assert same(found, content)

    def test_a_capture_is_refused_and_goes_on(self, tmp_path):
        values, ids = torch.ones(10, device=DEVICE), torch.arange(10, device=DEVICE)
        with features.Table.create(tmp_path / "table", 100, self.COLUMNS) as table:
            rows = table.lookup(ids)
            begun = table.lookup_async(ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                more = values + 1
                for ask in (
                    lambda: table.lookup(ids),
                    lambda: table.update(ids, rows),
                    lambda: table.update([1], {name: one[:1] for name, one in rows.items()}),
                    begun.result,
                ):
                    with pytest.raises(DeviceError, match="captur"):
                        ask()
            graph.replay()
            assert (more == 2).all()
            table.update(ids, begun.result())


class TestGraphs:
    """Batches of PyTorch Geometric."""

    NODES = 20_000

    @pytest.fixture
    def made(self, tmp_path):
        pytest.importorskip("torch_geometric")
        from penstock.integrations.pyg import FeatureStore, GatherLoader, Graph

        edges = torch.randint(0, self.NODES, (2, 200_000), generator=seeded(1))
        graph = Graph(edges, self.NODES)
        rows = drawn((self.NODES, 256), seed=2).cpu()
        features.write(tmp_path / "table", rows)
        with features.open(tmp_path / "table", cache=features.Cache(4 << 20)) as table:

            def make(**settings):
                store = FeatureStore({"x": table, "y": torch.arange(self.NODES)})
                nodes = torch.arange(3000)
                settings = {"batch_size": 100, "shuffle": True} | settings
                return GatherLoader(store, graph, [5, 5], nodes, **settings)

            yield make, rows.to(DEVICE), table

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("is_beside", [False, True])
    def test_batches_are_those_of_the_host(self, made, workers, is_beside):
        make, rows, table = made
        wanted = list(make())
        before = table.stats().device_bytes
        stream = torch.cuda.Stream() if is_beside else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            for found, batch in zip(make(device="cuda", num_workers=workers), wanted, strict=True):
                busy(seconds=0.005)
                assert found.batch_size == batch.batch_size
                for name in ("x", "y", "n_id", "e_id", "edge_index", "input_id"):
                    assert found[name].device == DEVICE
                    assert same(found[name], batch[name]), name
                assert same(found.x, rows[found.n_id])
        nbytes = sum(batch.x.nbytes for batch in wanted)
        assert table.stats().device_bytes == before + nbytes

    def test_batches_are_taken_on_another_stream_and_dropped(self, made):
        make, rows, _ = made
        epoch, used = iter(make(device="cuda")), torch.cuda.Stream()
        sums = []
        with torch.cuda.stream(used):
            for batch in epoch:
                busy(used, seconds=0.005)
                sums.append((batch.x == rows[batch.n_id]).all())
                del batch
        used.synchronize()
        assert all(map(bool, sums))

    def test_a_capture_is_refused_and_the_epoch_goes_on(self, made):
        make, rows, _ = made
        loader = make(device="cuda")
        epoch = iter(loader)
        next(epoch)
        values, graph = torch.ones(10, device=DEVICE), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            more = values + 1
            for ask in (lambda: next(epoch), lambda: iter(loader)):
                with pytest.raises(DeviceError, match="captur"):
                    ask()
        graph.replay()
        assert (more == 2).all()
        left = list(epoch)
        assert len(left) == 29
        assert all(same(batch.x, rows[batch.n_id]) for batch in left)

    def test_nodes_of_the_gpu_are_asked_for_there(self, made):
        make, rows, _ = made
        store = make().store
        ids = torch.randint(self.NODES, (500,), device=DEVICE)
        busy()
        ids += 0
        x, y = (store.get_tensor(group_name=None, attr_name=one, index=ids) for one in "xy")
        assert same(x, rows[ids])
        assert same(y, ids)


class TestOffload:
    def test_tensors_at_offsets_of_files(self, tmp_path):
        with offload.TensorIO() as io:
            for number, (name, tensor) in enumerate(layouts(torch.float32).items()):
                busy()
                offset = 20 * MIB * number + 7
                io.write(tensor, tmp_path / "file", offset).result()
                if name == "expanded":
                    continue
                target = torch.zeros_like(tensor)
                report = io.read(target, tmp_path / "file", offset).result()
                assert same(target, tensor), name
                assert report.nbytes == tensor.nbytes

    @pytest.mark.parametrize("blocks", [0.4, 2.0])
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_streamed_weights_compute_what_resident_ones_do(self, tmp_path, dtype, blocks):
        from safetensors.torch import save_file

        torch.manual_seed(1)
        model = torch.nn.ModuleDict(
            {"blocks": torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(12))}
        ).to(DEVICE)
        save_file(
            {name: value.cpu() for name, value in model.state_dict().items()},
            tmp_path / "model.safetensors",
        )
        x = torch.randn(32, 1024, device=DEVICE)

        class Stack(torch.nn.Module):
            def __init__(self, kind):
                super().__init__()
                made = (torch.nn.Linear(1024, 1024, dtype=kind) for _ in range(12))
                self.blocks = torch.nn.ModuleList(made)

            def forward(self, x):
                for block in self.blocks:
                    x = torch.tanh(block(x))
                return x

        kind = dtype or torch.float32
        resident = Stack(kind).to(DEVICE)
        resident.load_state_dict(model.state_dict())
        streamed = Stack(kind)
        nbytes = sum(value.nbytes for value in resident.state_dict().values())
        with torch.inference_mode():
            expected = resident(x.to(kind))
            streamed = offload.stream(
                streamed,
                weights=tmp_path,
                memory_bytes=int(blocks * nbytes) + 8 * MIB,
                device="cuda",
            )
            for _ in range(5):
                assert torch.equal(streamed(x.to(kind)), expected)

    @pytest.mark.parametrize("how", ["grouped_mm", "batched_mm", "eager"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_experts_that_are_chosen_compute_what_those_in_memory_do(self, tmp_path, how, dtype):
        transformers = pytest.importorskip("transformers")
        config = transformers.MixtralConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=16,
            vocab_size=1000,
            dtype=dtype,
        )
        torch.manual_seed(2)
        transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
        resident = transformers.MixtralForCausalLM.from_pretrained(tmp_path).eval().to(DEVICE)
        resident.set_experts_implementation(how)
        with pytest.raises(ValueError, match="is the least that works") as caught:
            offload.stream(tmp_path, memory_bytes=1, device="cuda")
        smallest = int(re.findall(r"(\d+) is the least", str(caught.value))[0])
        batches = [
            torch.randint(3, 1000, shape, generator=seeded(number)).to(DEVICE)
            for number, shape in enumerate([(2, 9), (1, 1), (3, 40), (1, 3)])
        ]
        side = torch.cuda.Stream()
        for memory_bytes in (smallest, 2 * smallest, 1 << 30):
            streamed = offload.stream(tmp_path, memory_bytes=memory_bytes, device="cuda")
            streamed.set_experts_implementation(how)
            with torch.inference_mode():
                for number, batch in enumerate(2 * batches):
                    expected = resident(batch).logits
                    stream = side if number % 3 == 2 else torch.cuda.current_stream()
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        busy(seconds=0.01)
                        found = streamed(batch).logits
                    torch.cuda.current_stream().wait_stream(stream)
                    assert same(found, expected), (memory_bytes, number)
            assert offload.report(streamed).experts.uses > 0
        graph = torch.cuda.CUDAGraph()
        values = torch.ones(10, device=DEVICE)
        experts = streamed.model.layers[0].mlp.experts
        chosen = torch.zeros((1, 2), dtype=torch.int64, device=DEVICE)
        hidden = torch.ones((1, 256), dtype=dtype, device=DEVICE)
        with torch.inference_mode(), torch.cuda.graph(graph):
            more = values + 1
            with pytest.raises(DeviceError, match="captur"):
                experts(hidden, chosen, chosen.to(dtype))
        graph.replay()
        assert (more == 2).all()


class TestOptimizers:
    @pytest.mark.parametrize("masters", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_steps_have_the_bits_of_those_of_the_host(self, tmp_path, dtype, masters):
        shapes = ((3000, 1003), (17,), (4096, 1024), (), *((64,) for _ in range(40)))
        on_host = [
            torch.nn.Parameter(torch.randn(shape, generator=seeded(at)).to(dtype))
            for at, shape in enumerate(shapes)
        ]
        on_gpu = [torch.nn.Parameter(one.detach().to(DEVICE)) for one in on_host]
        options = {"lr": 1e-2, "masters": masters, "memory_bytes": 32 * MIB}
        one, other = (
            offload.AdamW(some, directory=tmp_path / name, **options)
            for name, some in (("host", on_host), ("gpu", on_gpu))
        )
        for step in range(4):
            busy()
            for at, (host, gpu) in enumerate(zip(on_host, on_gpu, strict=True)):
                host.grad = torch.randn(host.shape, generator=seeded(100 * step + at)).to(dtype)
                # A kernel queued on the stream computes it, some time later.
                gpu.grad = host.grad.to(DEVICE, non_blocking=True) * 1
            one.step()
            other.step()
            sums = [gpu.detach().clone() for gpu in on_gpu]
            assert all(same(*pair) for pair in zip(on_host, sums, strict=True))
        one.close()
        other.close()

    def test_a_step_under_capture_is_refused(self, tmp_path):
        parameter = torch.nn.Parameter(torch.ones(MIB, device=DEVICE))
        optimizer = offload.AdamW([parameter], directory=tmp_path)
        parameter.grad = torch.ones_like(parameter)
        graph, counter = torch.cuda.CUDAGraph(), torch.zeros((), device=DEVICE)
        with torch.cuda.graph(graph):
            counter += 1
            with pytest.raises(DeviceError):
                optimizer.step()
        graph.replay()
        assert counter.item() == 1
        optimizer.step()
        assert parameter.detach().max().item() < 1
        optimizer.close()
