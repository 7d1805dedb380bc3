"""Boxes of tensors read into memory: never past its end, whatever the file claims."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import penstock
from dtensors import STRIDED, distribute, values
from penstock import _native
from penstock.checkpoint.loading import matching
from penstock.errors import StateMismatchError

MIB = 1 << 20

OPTIONS = penstock.Options().to_native()
UNTOUCHED = 0xEE


def fill(path, shape, item_bytes, strides=None):
    """Fills memory with the first box of the only tensor; returns the memory."""
    memory = np.full(4096, UNTOUCHED, np.uint8)
    place = (memory.ctypes.data, strides, item_bytes, memory, None)
    request = (0, (0,) * len(shape), shape, *place)
    _native.open(str(path)).fill([request], options=OPTIONS, progress=None)
    return memory


@pytest.fixture
def path(tmp_path):
    penstock.save(tmp_path / "ckpt", {"w": np.arange(200, dtype=np.float32).reshape(10, 20)})
    return tmp_path / "ckpt"


def test_only_what_was_asked_for_is_written(path):
    memory = fill(path, (2, 20), 4)
    assert np.array_equal(memory[:160].view(np.float32), np.arange(40, dtype=np.float32))
    assert (memory[160:] == UNTOUCHED).all()


@pytest.mark.parametrize("item_bytes", [1, 2, 8])
def test_items_of_another_size_than_the_memorys_are_refused(path, item_bytes):
    """Larger items in the file would write past the end of memory sized for smaller ones."""
    with pytest.raises(StateMismatchError, match="items of 4 bytes are stored") as caught:
        fill(path, (10, 20), item_bytes)
    assert caught.value.key == "w"


@pytest.mark.parametrize(
    ("shape", "item_bytes"), [((1,), 0), ((1 << 62,), 4), ((1 << 40, 1 << 40), 4)]
)
def test_memory_of_no_possible_size_is_refused(path, shape, item_bytes):
    with pytest.raises(ValueError, match="no size of memory"):
        fill(path, shape, item_bytes)


# A rank's parts of tensors, in memory that the native module cannot reach.


@contextmanager
def mesh_of(shape, rank):
    """Yields a mesh that contains this process, by PyTorch's fake group without other ranks."""
    ranks = torch.arange(torch.Size(shape).numel()).reshape(shape)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks.numel())
    try:
        yield DeviceMesh("cpu", ranks)
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=["addresses", "no addresses"])
def elsewhere(request, monkeypatch):
    """Pretends that `DTensor`s are on another device, with or without known addresses."""
    held = matching._held

    def moved(value, name):
        memory, shape, boxes = held(value, name)
        memory = replace(memory, device="xpu:0")
        if request.param == "no addresses":
            memory = replace(memory, address=0, low=0, high=0, strides=None)
        return memory, shape, boxes

    monkeypatch.setattr(matching, "_held", moved)


def load_part(path, whole, mesh, placements, *, is_turned=False):
    """Loads this rank's part of a tensor; returns its bits, the expected ones, and the report."""
    expected = distribute(whole, mesh, placements).to_local()
    local = torch.zeros_like(expected)
    if is_turned:
        local = torch.zeros_like(expected.t().contiguous()).t()
    tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    reports = []
    penstock.load(path, into={"w": tensor, "again": tensor}, report=reports.append)
    raw = torch.uint8 if whole.itemsize == 1 else torch.int32
    return local.view(raw), expected.view(raw), reports[0]


def save_whole(path, whole):
    penstock.save(path, {"w": whole, "again": whole})
    return path


@pytest.mark.usefixtures("elsewhere")
def test_a_rank_reads_what_it_holds_whatever_the_device(tmp_path):
    whole = values("big", (64, MIB // 4))
    path = save_whole(tmp_path / "ckpt", whole)
    with mesh_of((8,), rank=3) as mesh:
        found, expected, report = load_part(path, whole, mesh, [Shard(0)])
    assert torch.equal(found, expected)
    assert report.bytes == whole.nbytes // 8
    assert report.bytes_read <= report.bytes + 2 * MIB


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("shape", "dtype", "mesh", "placements"),
    [
        ((13, 5), torch.float32, (4,), [Shard(0)]),
        ((9, 11), torch.float8_e4m3fn, (2, 2), [Replicate(), Shard(1)]),
        ((8, 6), torch.float32, (2, 2), [STRIDED, Shard(0)]),
        ((12, 4), torch.float32, (2, 2), [STRIDED, Replicate()]),
    ],
)
def test_parts_of_any_kind_on_another_device(tmp_path, shape, dtype, mesh, placements):
    if None in placements:
        pytest.skip("PyTorch before 2.5 has no strided placement")
    whole = values("w", shape, dtype)
    path = save_whole(tmp_path / "ckpt", whole)
    for rank in range(4):
        for is_turned in (False, True):
            with mesh_of(mesh, rank) as ranks:
                found, expected, _ = load_part(path, whole, ranks, placements, is_turned=is_turned)
            assert torch.equal(found, expected)


def test_a_conjugate_is_filled_itself(tmp_path):
    """The elements of a conjugate in memory are not its values."""
    whole = values("w", (8,), torch.int32).float().to(torch.complex64)
    penstock.save(tmp_path / "ckpt", {"w": whole + 1j})
    with mesh_of((4,), rank=1) as mesh:
        local = torch.zeros(2, dtype=torch.complex64)
        tensor = DTensor.from_local(local.conj(), mesh, [Shard(0)], run_check=False)
        penstock.load(tmp_path / "ckpt", into={"w": tensor})
    assert torch.equal(local, (whole + 1j)[2:4].conj().resolve_conj())


def test_parts_in_one_memory_get_the_same_elements_or_are_refused(tmp_path):
    whole = torch.arange(16.0).reshape(4, 4)
    penstock.save(tmp_path / "ckpt", {"w": whole, "turned": whole.t(), "again": whole.t()})
    with mesh_of((2,), rank=1) as mesh:
        local = torch.zeros(2, 4)
        part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        with pytest.raises(StateMismatchError, match="shares memory with"):
            penstock.load(tmp_path / "ckpt", into={"w": part, "turned": part}, keys=["w", "turned"])
        assert not local.any()
        into = {"turned": part, "again": part}
        penstock.load(tmp_path / "ckpt", into=into, keys=list(into))
    assert torch.equal(local, whole.t()[2:])


def assert_nothing_is_read(path, whole):
    with mesh_of((4,), rank=3) as mesh:
        found, expected, report = load_part(path, whole, mesh, [Shard(0)])
    assert torch.equal(found, expected)
    assert (report.bytes, report.bytes_read) == (0, 0)


def test_a_rank_that_holds_nothing_reads_nothing(tmp_path):
    whole = values("w", (2, MIB))
    assert_nothing_is_read(save_whole(tmp_path / "ckpt", whole), whole)


@pytest.mark.usefixtures("elsewhere")
def test_nor_does_it_on_another_device(tmp_path):
    whole = values("w", (2, MIB))
    assert_nothing_is_read(save_whole(tmp_path / "ckpt", whole), whole)


@pytest.mark.usefixtures("elsewhere")
def test_two_tensors_of_one_that_is_stored_are_both_filled(tmp_path):
    """Without addresses the two look the same."""
    whole = values("w", (8, 3))
    path = save_whole(tmp_path / "ckpt", whole)
    with mesh_of((4,), rank=1) as mesh:
        into = {name: distribute(torch.zeros(8, 3), mesh, [Shard(0)]) for name in ("w", "again")}
        penstock.load(path, into=into)
        for tensor in into.values():
            assert torch.equal(tensor.to_local().view(torch.int32), whole[2:4].view(torch.int32))
