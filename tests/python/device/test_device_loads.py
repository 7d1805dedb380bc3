"""Tensors of a GPU are filled with the stored values, in the order of the loading stream."""

from __future__ import annotations

import contextlib
import json
import os

import numpy as np
import pytest
import torch

import forks
import penstock
from background import run_to_its_end
from gpu import DRIVER, DTYPES, VARIABLE, GpuTensor, drawn, layouts, same
from penstock.checkpoint.loading import device_tensors, route
from penstock.checkpoint.loading import fetch as fetching
from penstock.checkpoint.loading import load as loading
from penstock.checkpoint.loading.opened import CHUNK_BYTES
from penstock.checkpoint.saving.rank_save import RankAttempt
from penstock.errors import CorruptCheckpointError, DeviceError, PenstockWarning
from penstock.tensors.memory import of_tensor, to_source

MIB = 1 << 20

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_is_filled(gpu, disk_path, dtype):
    gpu.draw(3, 200)
    # Each has memory of its own: shared memory is stored once.
    hosts = {name: layouts(dtype)[name] for name in layouts(dtype) if name != "expanded"}
    penstock.save(disk_path / "a", {**hosts, "n": 3})
    state = {name: gpu.put(torch.zeros_like(host)) for name, host in hosts.items()}
    versions = {name: tensor._version for name, tensor in state.items()}
    reports = []
    loaded = penstock.load(disk_path / "a", into={**state, "n": 0}, report=reports.append)
    assert reports[0].device_bytes >= hosts["whole"].nbytes
    assert "to GPUs" in str(reports[0])
    assert loaded["n"] == 3
    for name, host in hosts.items():
        assert loaded[name] is state[name]
        assert same(gpu.read(state[name]), host), name
    assert state["whole"]._version > versions["whole"]


def test_what_a_stream_has_queued_comes_before_a_load_and_what_it_gets_after(gpu, disk_path):
    for seed in range(10):
        gpu.draw(seed, 300)
        host = drawn((MIB,), torch.float32, seed)
        penstock.save(disk_path / f"{seed}", {"w": host})
        tensor = gpu.put(torch.zeros(MIB))
        gpu.change(tensor, torch.ones(MIB))
        penstock.load(disk_path / f"{seed}", into={"w": tensor})
        assert same(gpu.read(tensor), host)


@contextlib.contextmanager
def flipped(path, at):
    """Flips a bit of the byte at a place of a file."""

    def flip():
        with open(path, "r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    flip()
    yield
    flip()


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("io_threads", [1, 2, 5])
def test_loads_end_with_few_buffers_also_when_they_fail(
    gpu, disk_path, memory_path, place, io_threads
):
    """Workers pass on each other's copies, and wait for buffers that others have filled."""
    path = (disk_path if place == "disk" else memory_path) / "a"
    hosts = {f"{number}": drawn((MIB,), torch.float32, number) for number in range(6)}
    penstock.save(path, hosts)
    options = penstock.Options(staging_bytes=5 * MIB, extent_bytes=MIB, io_threads=io_threads)
    (shard,) = (one for one in path.iterdir() if one.suffix == ".safetensors")
    for seed in range(12):
        gpu.draw(seed, 500)
        state = {name: gpu.put(torch.zeros(MIB)) for name in hosts}
        reports = []
        penstock.load(path, into=state, options=options, report=reports.append)
        if str(memory_path).startswith("/dev/shm") and place == "memory":
            assert reports[0].engine == "sync"
        for name, host in hosts.items():
            assert same(gpu.read(state[name]), host), name
        place_of_bit = shard.stat().st_size * (seed + 1) // 13
        with flipped(shard, place_of_bit), pytest.raises(CorruptCheckpointError):
            penstock.load(path, into=state, options=options)


def test_a_view_that_is_stored_with_its_whole_is_filled_with_it(gpu, disk_path):
    host = torch.arange(3000.0).reshape(30, 100)
    penstock.save(disk_path / "a", {"whole": host, "part": host[10:20]})
    whole = gpu.put(torch.zeros(30, 100))
    part = type(whole)(gpu, whole.storage_address, torch.zeros(30, 100)[10:20])
    penstock.load(disk_path / "a", into={"whole": whole, "part": part})
    assert same(gpu.read(whole), host)
    assert same(gpu.read(part), host[10:20])


def test_damage_on_storage_is_an_error(gpu, disk_path):
    penstock.save(disk_path / "a", {"w": drawn((3 * MIB,), torch.float32)})
    (shard,) = (disk_path / "a").glob("shard-*")
    with open(shard, "r+b") as file:
        file.seek(-MIB, os.SEEK_END)
        file.write(b"\0damage\0")
    tensor = gpu.put(torch.zeros(3 * MIB))
    with pytest.raises(CorruptCheckpointError) as caught:
        penstock.load(disk_path / "a", into={"w": tensor})
    assert caught.value.tensor == "w"


def test_a_load_in_a_capture_is_refused(gpu, disk_path):
    penstock.save(disk_path / "a", {"w": torch.ones(MIB)})
    tensor = gpu.put(torch.zeros(MIB))
    gpu.forget()
    with gpu.capturing(), pytest.raises(DeviceError, match="outside of the capture"):
        penstock.load(disk_path / "a", into={"w": tensor})
    penstock.load(disk_path / "a", into={"w": tensor})
    assert same(gpu.read(tensor), torch.ones(MIB))


def test_a_second_load_pins_nothing(gpu, disk_path):
    penstock.save(disk_path / "a", {"w": drawn((3 * MIB,), torch.float32)})
    tensor = gpu.put(torch.zeros(3 * MIB))
    pinned = []
    for _ in range(3):
        penstock.load(disk_path / "a", into={"w": tensor})
        pinned.append(gpu.calls("cuMemHostRegister_v2"))
    assert pinned[1] == pinned[2]


# New tensors.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_tensors_of_every_dtype_are_made_where_they_are_wanted(gpu, disk_path, dtype):
    gpu.draw(5, 200)
    hosts = {name: host for name, host in layouts(dtype).items() if name != "expanded"}
    # Each has memory of its own.
    hosts = {name: torch.stack([host])[0] for name, host in hosts.items()}
    array = np.arange(5000)
    penstock.save(disk_path / "a", {**hosts, "array": array, "bytes": b"3" * 5000, "n": 3})
    reports = []
    loaded = penstock.load(disk_path / "a", device="cuda:0", report=reports.append)
    assert reports[0].device_bytes == sum(host.nbytes for host in hosts.values())
    for name, host in hosts.items():
        if host.numel():
            assert type(loaded[name]) is GpuTensor
            assert same(gpu.read(loaded[name]), host), name
        assert loaded[name].shape == host.shape
    assert np.array_equal(loaded["array"], array)
    assert (loaded["bytes"], loaded["n"]) == (b"3" * 5000, 3)


def test_ties_and_views_are_those_of_a_load_to_the_host(gpu, disk_path):
    whole = drawn((300, 40), torch.float32)
    state = {"whole": whole, "same": whole, "rows": whole[7:9], "turned": whole.t()}
    penstock.save(disk_path / "a", {**state, "other": whole.clone()})
    reports = []
    loaded = penstock.load(disk_path / "a", device="cuda", report=reports.append)
    assert reports[0].device_bytes == 2 * whole.nbytes
    assert loaded["same"] is loaded["whole"]
    for name, host in state.items():
        assert same(gpu.read(loaded[name]), host), name
        assert loaded[name].storage_address == loaded["whole"].storage_address
        assert loaded[name].stride() == host.stride()
    assert loaded["other"].storage_address != loaded["whole"].storage_address
    (turned,) = penstock.load(disk_path / "a", device="cuda", keys="turned").values()
    assert same(gpu.read(turned), whole.t())


def test_an_array_that_is_a_tensor_as_well_stays_on_the_host(gpu, disk_path):
    host, other = drawn((3000,), torch.float32), drawn((3000,), torch.float32, 1)
    penstock.save(disk_path / "a", {"w": host, "array": host.numpy(), "other": other})
    reports = []
    loaded = penstock.load(disk_path / "a", device="cuda", report=reports.append)
    assert reports[0].device_bytes == other.nbytes
    assert np.array_equal(loaded["array"], host.numpy())
    assert same(gpu.read(loaded["w"]), host)
    assert same(gpu.read(loaded["other"]), other)


def test_of_some_leaves_only_their_bytes_are_read(gpu, disk_path):
    tensors = {f"{index}": drawn((MIB,), torch.float32, index) for index in range(4)}
    penstock.save(disk_path / "a", {"model": tensors, "rest": drawn((MIB,), torch.float32, 9)})
    reports = []
    loaded = penstock.load(
        disk_path / "a", device="cuda", keys=["model.1", "model.3"], report=reports.append
    )
    assert reports[0].bytes_read <= 2 * 4 * MIB + 2 * CHUNK_BYTES
    assert reports[0].device_bytes == 2 * 4 * MIB
    assert list(loaded) == ["model"]
    for name in ("1", "3"):
        assert same(gpu.read(loaded["model"][name]), tensors[name])


def test_what_ranks_hold_boxes_of_is_put_together_on_the_device(gpu, disk_path):
    host = drawn((6, 500), torch.float32)
    rows = {"$": "tensor", "g": "rows", "dtype": "float32", "shape": [6, 500]}
    leaves = {"rows": rows, "part": {**rows, "view": [[2, 500], [500, 1], 1000]}}
    save_boxes(disk_path / "a", host, leaves)
    reports = []
    loaded = penstock.load(disk_path / "a", device="cuda", report=reports.append)
    assert reports[0].device_bytes == host.nbytes
    assert same(gpu.read(loaded["rows"]), host)
    assert same(gpu.read(loaded["part"]), host[2:4])
    assert loaded["part"].storage_address == loaded["rows"].storage_address


def save_boxes(path, host, leaves):
    """Saves a checkpoint of two ranks that hold half of the rows each."""
    half = len(host) // 2

    def source(number):
        memory = of_tensor(host[half * number : half * (number + 1)], "rows")
        return to_source(memory, "rows", ("rows", tuple(host.shape), (half * number, 0)))

    options = penstock.Options().to_native()
    first = RankAttempt.begin(str(path), overwrite=False)
    other = RankAttempt.join(str(path), first.id, 1)
    votes = {1: other.write(1, [source(1)], options)}
    first.write_shards(0, [source(0)], options)
    votes[0] = first.write_part(json.dumps(leaves))
    first.commit(votes, metadata="{}", overwrite=False)


def test_new_memory_is_filled_after_what_was_queued_before_it_was_given_back(gpu, disk_path):
    for seed in range(10):
        gpu.draw(seed, 300)
        host = drawn((MIB,), torch.float32, seed)
        penstock.save(disk_path / f"{seed}", {"w": host})
        loaded = penstock.load(disk_path / f"{seed}", device="cuda")
        assert same(gpu.read(loaded["w"]), host)


@pytest.mark.parametrize("way", ["device", "into", "scattered"])
def test_memory_of_the_host_is_what_may_be_staged(gpu, disk_path, monkeypatch, way):
    host = {f"{index}": drawn((4, MIB), torch.float32, index) for index in range(4)}
    penstock.save(disk_path / "a", host)
    keywords, reports = {"device": "cuda"}, []
    if way != "device":
        like = torch.zeros(MIB, 4).t() if way == "scattered" else torch.zeros(4, MIB)
        keywords = {"into": {name: gpu.put(like) for name in host}}
    fetches = watch_fetches(monkeypatch)
    loaded = penstock.load(
        disk_path / "a",
        options=penstock.Options(staging_bytes=10 * MIB),
        report=reports.append,
        **keywords,
    )
    assert [places for places, *_ in fetches] == [{}]
    stored = sum(one.nbytes for one in host.values())
    assert reports[0].staging_peak_bytes <= 10 * MIB
    assert reports[0].device_bytes == stored
    assert stored <= reports[0].bytes_read <= stored + 4 * CHUNK_BYTES
    for name, one in host.items():
        assert same(gpu.read(loaded[name]), one)


def watch_fetches(monkeypatch):
    """Records the result of every read of a load into host memory."""
    found = []

    def watched(*arguments, **keywords):
        found.append(fetch(*arguments, **keywords))
        return found[-1]

    fetch = fetching.fetch
    monkeypatch.setattr(loading, "fetch", watched)
    monkeypatch.setattr(device_tensors, "fetch", watched)
    return found


def damage(directory):
    """Changes a byte of the last tensor in a checkpoint's shard."""
    (shard,) = directory.glob("shard-*")
    with open(shard, "r+b") as file:
        file.seek(-MIB, os.SEEK_END)
        file.write(b"\0damage\0")


def test_nothing_damaged_is_handed_out_and_its_memory_is_given_back(gpu, disk_path):
    state = {"v": drawn((MIB,), torch.float32), "w": drawn((3 * MIB,), torch.float32, 1)}
    store = penstock.CheckpointStore(disk_path)
    store.save(1, state)
    store.save(2, state)
    damage(disk_path / "step-0000000002")
    with pytest.raises(CorruptCheckpointError) as caught:
        store.load(device="cuda")
    assert caught.value.tensor == "w"
    # Also after the caller has caught the error and loads an older step.
    assert gpu.fresh.nbytes == 0
    with pytest.warns(PenstockWarning, match="passed over"):
        loaded = store.load(device="cuda", fallback=True)
    assert gpu.fresh.nbytes == sum(host.nbytes for host in state.values())
    for name, host in state.items():
        assert same(gpu.read(loaded[name]), host)


def test_damaged_boxes_are_handed_out_nowhere_either(gpu, disk_path):
    host = drawn((6, MIB), torch.float32)
    rows = {"$": "tensor", "g": "rows", "dtype": "float32", "shape": [6, MIB]}
    save_boxes(disk_path / "a", host, {"rows": rows})
    for shard in (disk_path / "a").glob("shard-*"):
        with open(shard, "r+b") as file:
            file.seek(-MIB, os.SEEK_END)
            file.write(b"\0damage\0")
    with pytest.raises(CorruptCheckpointError) as caught:
        penstock.load(disk_path / "a", device="cuda")
    assert caught.value.tensor == "rows"
    assert gpu.fresh.nbytes == 0


def test_a_step_that_was_read_whole_is_marked_good(gpu, disk_path, monkeypatch):
    store = penstock.CheckpointStore(disk_path)
    host = {
        "w": drawn((MIB,), torch.float32),
        "n": np.arange(3000),
        "t": drawn((700, 9), torch.int8),
    }
    for step in range(4):
        store.save(step, host)
    store.load(0, device="cuda")
    into = {"w": gpu.put(torch.zeros(MIB)), "n": np.zeros(3000, int)}
    store.load(1, into={**into, "t": gpu.put(torch.zeros((9, 700), dtype=torch.int8).t())})
    assert [step for step, mark in store.marks().items() if mark.is_good] == [0, 1]
    store.load(2, device="cuda", keys="w")
    # Tensors staged in device memory piece by piece are not read with the other ones.
    monkeypatch.setattr(device_tensors, "DEVICE_STAGING_BYTES", 700)
    turned = gpu.put(torch.zeros((700, 9), dtype=torch.int8).as_strided((700, 9), (1, 700)))
    again = gpu.put(torch.zeros((700, 9), dtype=torch.int8).as_strided((700, 9), (1, 700)))
    store.save(4, {**host, "again": host["t"].clone()})
    store.load(4, into={**into, "t": turned, "again": again})
    assert same(gpu.read(again), host["t"])
    assert [step for step, mark in store.marks().items() if mark.is_good] == [0, 1]


def test_new_tensors_in_a_capture_are_refused(gpu, disk_path, monkeypatch):
    penstock.save(disk_path / "a", {"w": torch.ones(MIB)})
    # PyTorch has cached memory for them, so it does not call the driver.
    ready = {shape: gpu.put(torch.zeros(shape)) for shape in ((0,), (MIB,))}
    gpu.forget()
    with monkeypatch.context() as patch, gpu.capturing():
        patch.setattr(gpu, "empty", lambda shape, _: ready[shape])
        with pytest.raises(DeviceError, match="outside of the capture"):
            penstock.load(disk_path / "a", device="cuda")
    assert same(gpu.read(penstock.load(disk_path / "a", device="cuda")["w"]), torch.ones(MIB))


def test_a_fork_loads_to_the_host_and_is_refused_the_device(disk_path):
    script = """
        import os, sys, torch
        sys.path.insert(0, sys.argv[2])
        import penstock
        from gpu import taken_for_real
        torch.set_num_threads(1)
        with taken_for_real() as gpu:
            penstock.save(sys.argv[1], {"w": torch.ones(1 << 20)})
            tensor = gpu.put(torch.zeros(1 << 20))
            penstock.load(sys.argv[1], device="cuda")
            child = os.fork()
            if child == 0:
                try:
                    # PyTorch takes note of a fork where CUDA is in use.
                    torch.cuda._is_in_bad_fork = lambda: True
                    assert penstock.load(sys.argv[1])["w"].sum() == 1 << 20
                    for keywords in ({"device": "cuda"}, {"into": {"w": tensor}}):
                        try:
                            penstock.load(sys.argv[1], **keywords)
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
            found = penstock.load(sys.argv[1], device="cuda")["w"]
            assert torch.equal(gpu.read(found), torch.ones(1 << 20))
    """
    run_apart(script, disk_path / "a", DRIVER)


def test_without_a_driver_pytorch_copies_what_it_gets(disk_path):
    script = """
        import os, sys, torch
        sys.path.insert(0, sys.argv[2])
        import penstock
        from gpu import taken_for_real
        with taken_for_real() as gpu:
            host = torch.arange(1000.0)
            penstock.save(sys.argv[1], {"w": host, "v": host[2:5]})
            reports = []
            loaded = penstock.load(sys.argv[1], device="cuda", report=reports.append)
            assert reports[0].device_bytes == 0
            assert torch.equal(gpu.read(loaded["w"]), host)
            assert torch.equal(gpu.read(loaded["v"]), host[2:5])
            targets = {"w": gpu.put(torch.zeros(1000)), "v": gpu.put(torch.zeros(3))}
            penstock.load(sys.argv[1], into=targets, report=reports.append)
            assert reports[1].device_bytes == 0
            assert torch.equal(gpu.read(targets["w"]), host)
            assert torch.equal(gpu.read(targets["v"]), host[2:5])
    """
    run_apart(script, disk_path / "a", "/nowhere/libcuda.so.1")


def run_apart(script, path, driver):
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")
    here = DRIVER.parents[2] / "tests/python"
    variables = {VARIABLE: str(driver)}
    ended = run_to_its_end(script, path, here, popen=forks.Popen, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr


# Tensors that need a copy on the device.


def test_what_lies_scattered_goes_through_so_much_memory_of_the_device(gpu, disk_path, monkeypatch):
    gpu.draw(9, 100)
    monkeypatch.setattr(device_tensors, "DEVICE_STAGING_BYTES", 100_000)
    hosts = {f"{index}": drawn((60, 100 + index), torch.float32, index) for index in range(20)}
    hosts["large"] = drawn((300, 500), torch.float64, 30)
    penstock.save(disk_path / "a", hosts)
    state = {name: turned(gpu, host) for name, host in hosts.items()}
    versions = {name: tensor._version for name, tensor in state.items()}
    reports, seen = [], []
    penstock.load(
        disk_path / "a",
        into=state,
        report=reports.append,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert gpu.fresh.nbytes_max == hosts["large"].nbytes
    assert gpu.fresh.nbytes == 0
    assert reports[0].device_bytes == sum(host.nbytes for host in hosts.values())
    assert reports[0].tensors == len(hosts)
    assert len({total for _, total in seen}) > 1
    for name, host in hosts.items():
        assert same(gpu.read(state[name]), host), name
        assert state[name]._version > versions[name]


def turned(gpu, host):
    """Returns column-major memory for a matrix."""
    rows, columns = host.shape
    return gpu.put(torch.zeros(columns, rows, dtype=host.dtype).t())


def test_damage_of_a_later_part_is_an_error(gpu, disk_path, monkeypatch):
    monkeypatch.setattr(device_tensors, "DEVICE_STAGING_BYTES", 1 << 20)
    hosts = {name: drawn((1000, 3000), torch.float32, 1) for name in "vw"}
    hosts["w"] += 1
    penstock.save(disk_path / "a", hosts)
    damage(disk_path / "a")
    with pytest.raises(CorruptCheckpointError) as caught:
        penstock.load(disk_path / "a", into={name: turned(gpu, hosts[name]) for name in "vw"})
    assert caught.value.tensor == "w"
    assert gpu.fresh.nbytes == 0


def test_views_are_filled_whatever_the_target_has_of_them(gpu, disk_path, monkeypatch):
    host = drawn((300, 40), torch.float32)
    other = drawn((200, 50), torch.float32, 1)
    penstock.save(
        disk_path / "a",
        {"whole": host, "rows": host[10:20], "turned": host.t(), "other": other, "o": other[3:9]},
    )
    for limit in (device_tensors.DEVICE_STAGING_BYTES, 1000):
        monkeypatch.setattr(device_tensors, "DEVICE_STAGING_BYTES", limit)
        monkeypatch.setattr(route, "DEVICE_STAGING_BYTES", limit)
        state = {
            "whole": gpu.put(torch.zeros(300, 40)),
            "rows": gpu.put(torch.zeros(10, 40)),
            "turned": gpu.put(torch.zeros(40, 300)),
            "other": torch.zeros(50, 200).t(),
            "o": gpu.put(torch.zeros(6, 60)[:, :50]),
        }
        fetches = watch_fetches(monkeypatch)
        penstock.load(disk_path / "a", into=state)
        # The whole tensor is in place, and its parts are copied from there.
        on_host = {index for places, *_ in fetches for index in places}
        assert len(on_host) == (0 if limit > 1000 else 1)
        assert same(gpu.read(state["whole"]), host)
        assert same(gpu.read(state["rows"]), host[10:20])
        assert same(gpu.read(state["turned"]), host.t())
        assert same(state["other"], other)
        assert same(gpu.read(state["o"]), other[3:9])
        monkeypatch.undo()


def test_views_are_filled_where_the_whole_has_gaps_between_its_rows(gpu, disk_path):
    host = drawn((300, 200), torch.float32)
    penstock.save(disk_path / "a", {"whole": host, "part": host[10:20]})
    whole, part = gpu.put(torch.zeros(300, 400)[:, 100:300]), gpu.put(torch.zeros(10, 200))
    penstock.load(disk_path / "a", into={"whole": whole, "part": part})
    assert same(gpu.read(whole), host)
    assert same(gpu.read(part), host[10:20])


def test_one_tensor_comes_to_many_places_of_all_kinds(gpu, disk_path):
    host = drawn((300, 40), torch.float32)
    names = ["first", "second", "rows", "turned", "host", "host rows", "array"]
    for order in (names, names[::-1]):
        for left_out in ((), ("host",), ("array",), ("host", "array")):
            path = disk_path / f"{order[0]} {left_out}"
            used = [name for name in order if name not in left_out]
            penstock.save(path, {name: host.numpy() if name == "array" else host for name in used})
            state = {
                "first": gpu.put(torch.zeros(300, 40)),
                "second": gpu.put(torch.zeros(300, 40)),
                "rows": gpu.put(torch.zeros(300, 250)[:, 30:70]),
                "turned": gpu.put(torch.zeros(40, 300).t()),
                "host": torch.zeros(300, 40),
                "host rows": torch.zeros(300, 50)[:, :40],
                "array": np.zeros((300, 80), np.float32)[:, ::2],
            }
            state = {name: state[name] for name in used}
            penstock.load(path, into=state)
            for name in used:
                value = state[name]
                value = gpu.read(value) if type(value) is GpuTensor else torch.as_tensor(value)
                assert same(value, host), (order[0], left_out, name)


def test_boxes_of_ranks_come_to_where_they_lie_scattered(gpu, disk_path):
    host = drawn((6, 500), torch.float32)
    rows = {"$": "tensor", "g": "rows", "dtype": "float32", "shape": [6, 500]}
    save_boxes(disk_path / "a", host, {"a": rows, "b": rows})
    state = {"a": gpu.put(torch.zeros(6, 500)), "b": turned(gpu, host)}
    penstock.load(disk_path / "a", into=state)
    assert same(gpu.read(state["a"]), host)
    assert same(gpu.read(state["b"]), host)


def test_pytorch_is_asked_for_its_stream_once_in_a_call(gpu, disk_path):
    calls = {
        "save": lambda state: penstock.save(disk_path / f"{len(state)}", state),
        "into": lambda state: penstock.load(disk_path / f"{len(state)}", into=state),
        "device": lambda state: penstock.load(disk_path / f"{len(state)}", device="cuda"),
    }
    for name, call in calls.items():
        asked = []
        for count in (1, 30):
            hosts = [drawn((10, 300), torch.float32, index) for index in range(count)]
            state = {f"{index}": gpu.put(host) for index, host in enumerate(hosts)}
            gpu.asked.clear()
            call(state)
            asked.append(len(gpu.asked))
        assert asked[0] == asked[1] <= 2, name
