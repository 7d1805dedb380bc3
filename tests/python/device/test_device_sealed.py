"""Tensors of a GPU are sealed in the buffer that receives them, and opened on the way back."""

from __future__ import annotations

import pytest
import torch

import penstock
from gpu import DTYPES, GpuTensor, drawn, layouts, same
from penstock import Sealing
from penstock.errors import DeviceError, SealedError, TamperedError

MIB = 1 << 20
KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32
SEALING = Sealing([KEY])

GENERATOR = (1 | 0x9A6C9329AC4BC9B5 << 1).to_bytes(9, "little")
"""Added to a text anywhere, it leaves the CRC-64 as it was."""

torch.set_num_threads(1)


def sealed(path):
    return penstock.CheckpointStore(path, sealing=SEALING, identities=[KEY])


def nothing_clear(path, hosts):
    for file in path.rglob("*"):
        stored = file.read_bytes() if file.is_file() else b""
        for name, host in hosts.items():
            text = host.contiguous().flatten()[:64].view(torch.uint8).numpy().tobytes()
            assert len(text) < 16 or text not in stored, (file.name, name)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[::4], ids=str)
def test_every_layout_is_sealed_and_comes_back(gpu, disk_path, dtype, verify):
    gpu.draw(3, 200)
    hosts = {name: host for name, host in layouts(dtype).items() if name != "expanded"}
    state = {name: gpu.put(host.clone()) for name, host in hosts.items()}
    path = disk_path / "a"
    report = penstock.save(path, {**state, "n": 3}, sealing=SEALING)
    assert report.device_bytes > 0
    nothing_clear(path, hosts)
    options = penstock.Options(verify=verify)
    reports = []
    keywords = {"identities": [KEY], "options": options, "report": reports.append}
    loaded = penstock.load(path, device="cuda:0", **keywords)
    targets = {name: gpu.put(torch.zeros_like(host)) for name, host in hosts.items()}
    filled = penstock.load(path, into={**targets, "n": 0}, **keywords)
    on_host = penstock.load(path, **keywords)
    assert all(one.device_bytes > 0 for one in reports[:2])
    for name, host in hosts.items():
        assert type(loaded[name]) is GpuTensor or not host.numel()
        assert same(gpu.read(loaded[name]), host), name
        assert filled[name] is targets[name]
        assert same(gpu.read(targets[name]), host), name
        assert same(on_host[name], host), name


@pytest.mark.parametrize("lazy", [False, True])
def test_a_training_that_goes_on_tears_no_sealed_save(gpu, disk_path, lazy):
    store = sealed(disk_path / "store")
    sizes = [3 * MIB // 4 + 5, 100, 70_000, 2 * MIB]
    for seed in range(6):
        gpu.draw(seed, 150)
        before = [drawn((size,), torch.float32, seed) for size in sizes]
        state = [gpu.put(tensor) for tensor in before]
        pending = store.save_async(seed, {"w": state}, lazy=lazy)
        pending.stage()
        for tensor in state:
            gpu.change(tensor, drawn(tensor.shape, torch.float32, seed + 1000))
        pending.result()
        for tensor, expected in zip(store.load(seed, device="cuda")["w"], before, strict=True):
            assert same(gpu.read(tensor), expected)
        gpu.forget()


@pytest.mark.parametrize("io_threads", [1, 3])
def test_few_buffers_suffice(gpu, disk_path, io_threads):
    path = disk_path / "a"
    hosts = {f"{number}": drawn((MIB + number,), torch.float32, number) for number in range(5)}
    options = penstock.Options(staging_bytes=5 * MIB, extent_bytes=MIB, io_threads=io_threads)
    state = {name: gpu.put(host) for name, host in hosts.items()}
    penstock.save(path, state, sealing=SEALING, options=options)
    for seed in range(4):
        gpu.draw(seed, 500)
        targets = {name: gpu.put(torch.zeros_like(host)) for name, host in hosts.items()}
        penstock.load(path, into=targets, identities=[KEY], options=options)
        for name, host in hosts.items():
            assert same(gpu.read(targets[name]), host), name


@pytest.mark.parametrize("verify", [True, False])
def test_nothing_that_was_changed_is_handed_out(gpu, disk_path, verify):
    hosts = {"v": drawn((MIB,), torch.float32), "w": drawn((3 * MIB,), torch.float32, 1)}
    store = sealed(disk_path / "store")
    store.save(1, hosts)
    store.save(2, {name: gpu.put(host) for name, host in hosts.items()})
    with pytest.raises(SealedError):
        penstock.load(store.path(2), device="cuda")
    (shard,) = (disk_path / "store" / "step-0000000002").glob("shard-*")
    data = bytearray(shard.read_bytes())
    for place, byte in enumerate(GENERATOR, len(data) - 2 * MIB):
        data[place] ^= byte
    shard.write_bytes(data)
    options = penstock.Options(verify=verify)
    keywords = {"identities": [KEY], "options": options}
    before = gpu.fresh.nbytes
    with pytest.raises(TamperedError):
        penstock.load(store.path(2), device="cuda", **keywords)
    assert gpu.fresh.nbytes == before
    target = gpu.put(torch.zeros(3 * MIB))
    with pytest.raises(TamperedError):
        penstock.load(store.path(2), into={"w": target}, keys="w", **keywords)
    found = gpu.read(target)
    is_as_stored = found == hosts["w"]
    assert (is_as_stored | (found == 0)).all()
    assert not is_as_stored.all()
    with pytest.raises(TamperedError):
        store.load(device="cuda", fallback=True)


def test_a_driver_that_fails_costs_one_call(gpu, disk_path):
    hosts = {f"{number}": drawn((MIB,), torch.float32, number) for number in range(4)}
    state = {name: gpu.put(host) for name, host in hosts.items()}
    targets = {name: gpu.put(torch.zeros_like(host)) for name, host in hosts.items()}
    options = penstock.Options(extent_bytes=MIB)
    path = disk_path / "a"
    for call, nth in (
        ("cuMemcpyDtoHAsync_v2", 1),
        ("cuMemcpyDtoHAsync_v2", 3),
        ("cuEventRecord", 1),
    ):
        gpu.fail(call, nth)
        with pytest.raises(DeviceError):
            penstock.save(path, state, sealing=SEALING, options=options)
        gpu.mend()
        assert not path.exists()
    penstock.save(path, state, sealing=SEALING, options=options)
    keywords = {"into": targets, "identities": [KEY], "options": options}
    for call, nth in (
        ("cuMemcpyHtoDAsync_v2", 1),
        ("cuEventRecord", 1),
    ):
        gpu.fail(call, nth)
        with pytest.raises(DeviceError):
            penstock.load(path, **keywords)
        gpu.mend()
    penstock.load(path, **keywords)
    for name, host in hosts.items():
        assert same(gpu.read(targets[name]), host), name
