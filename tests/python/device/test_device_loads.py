"""Tensors of a GPU are filled with what is stored, in the order of the stream of whoever loads."""

from __future__ import annotations

import os

import pytest
import torch

import penstock
from gpu import DTYPES, drawn, layouts, same

MIB = 1 << 20

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_is_filled(gpu, disk_path, dtype):
    gpu.draw(3, 200)
    # Each with memory of its own: what shares some is stored once.
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
    with pytest.raises(penstock.CorruptCheckpointError) as caught:
        penstock.load(disk_path / "a", into={"w": tensor})
    assert caught.value.tensor == "w"


def test_a_load_in_a_capture_is_refused(gpu, disk_path):
    penstock.save(disk_path / "a", {"w": torch.ones(MIB)})
    tensor = gpu.put(torch.zeros(MIB))
    gpu.forget()
    with gpu.capturing(), pytest.raises(penstock.DeviceError, match="outside of the capture"):
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
