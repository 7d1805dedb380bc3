"""Ranks of a real job save one checkpoint together, and any others load it."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import penstock
from compare import assert_same
from dtensors import (
    LAYOUTS,
    LINE,
    STRIDED,
    Layout,
    as_loaded,
    cleared,
    dtensors,
    local_bytes,
    plain,
    rank,
    sharded,
    values,
    whole_dtensors,
)

pytestmark = pytest.mark.quick

MIB = 1 << 20


# Functions that run on every rank.


def save(path):
    return penstock.save(path, {"d": dtensors(), "p": plain(rank())})


def load_without_into(path):
    state = penstock.load(path)
    assert_same(state["d"], whole_dtensors())
    assert_same(state["p"], as_loaded(plain(rank())))


def load_into(path):
    expected = {"d": dtensors(), "p": as_loaded(plain(rank()))}
    state = cleared(expected)
    assert local_bytes(state) != local_bytes(expected)
    loaded = penstock.load(path, into=state)
    assert local_bytes(loaded) == local_bytes(expected)
    assert local_bytes(state) == local_bytes(expected)
    assert_same(loaded["p"], expected["p"])


def load_into_whole(path):
    state = {"d": cleared(whole_dtensors())}
    penstock.load(path, into=state, keys="d.*")
    assert_same(state["d"], whole_dtensors())


def load_keys(path):
    state = penstock.load(path, keys=["d.nested", "d.tied.1.*", "p.plain.own.text"])
    nested = whole_dtensors()["nested"]
    assert_same(
        state,
        {
            "d": {"nested": nested, "tied": [{"again": nested}]},
            "p": {"plain": OrderedDict(own={"text": f"of {rank()}"})},
        },
    )


def save_dtensors(path):
    return penstock.save(path, dtensors())


def load_dtensors_into(path):
    state = {"d": cleared(dtensors())}
    penstock.load(path, into=state, keys="d.*")
    assert local_bytes(state["d"]) == local_bytes(dtensors())


def of_all(placements, shape, dtype=torch.float32):
    """Returns a tensor over all ranks of the job, in one row or two."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    line = list(range(size))
    mesh = line if len(placements) == 1 else [line[: size // 2], line[size // 2 :]]
    return Layout(mesh, placements, shape, dtype)


def resharded_layouts(is_saved):
    """Returns layouts that differ between saving and loading."""
    size = dist.get_world_size()
    grids = {}
    if size == 4:
        one, other = ([Shard(0), Shard(1)], [STRIDED, Shard(0)])
        placements = one if is_saved else other
        grids = {
            "grid": of_all(placements, (14, 6)),
            "hybrid": of_all([Replicate(), Shard(1)], (5, 9)),
        }
    else:
        grids = {"grid": of_all([Shard(1)], (14, 6)), "hybrid": of_all([Shard(0)], (5, 9))}
    return {
        **grids,
        "rows": of_all([Shard(0)], (13, 5)),
        "turned": of_all([Shard(0 if is_saved else 1)], (9, 11), torch.bfloat16),
        "gathered": of_all([Shard(0) if is_saved else Replicate()], (7, 3), torch.complex64),
        "scattered": of_all([Replicate() if is_saved else Shard(0)], (7, 3), torch.bool),
    }


SHAPES = {
    "grid": ((14, 6), torch.float32),
    "hybrid": ((5, 9), torch.float32),
    "rows": ((13, 5), torch.float32),
    "turned": ((9, 11), torch.bfloat16),
    "gathered": ((7, 3), torch.complex64),
    "scattered": ((7, 3), torch.bool),
}


def save_by_all(path):
    if dist.is_initialized():
        layouts = resharded_layouts(is_saved=True)
        state = {name: sharded(name, layout) for name, layout in layouts.items()}
    else:
        state = {name: values(name, *kind) for name, kind in SHAPES.items()}
    penstock.save(path, {"t": state, "plain": values("plain", (3, 3)), "step": 3})


def load_by_all(path):
    layouts = resharded_layouts(is_saved=False)
    expected = {name: sharded(name, layout) for name, layout in layouts.items()}
    state = {"t": cleared(expected), "plain": torch.zeros(3, 3), "step": 0}
    penstock.load(path, into=state)
    assert local_bytes(state["t"]) == local_bytes(expected)
    whole = {name: values(name, *kind) for name, kind in SHAPES.items()}
    assert_same(state["plain"], values("plain", (3, 3)))
    assert state["step"] == 3
    assert_same(penstock.load(path, keys="t.*"), {"t": whole})


BIG = (2048, 4096)


def load_rows(path):
    found = []
    expected = sharded("big", Layout(LINE, [Shard(0)], BIG))
    state = {"big": cleared(expected)}
    penstock.load(path, into=state, report=found.append)
    assert local_bytes(state) == local_bytes(expected)
    return found[0]


def save_columns(path):
    layout = Layout(LINE, [Shard(1)], BIG)
    penstock.save(path, {"big": sharded("big", layout)}, overwrite=True)


def replicated():
    """Returns tensors of 16 MiB, 3 MiB, 64 KiB and 4 bytes."""
    sizes = [(1, (2048, 2048)), (12, (768, 1024)), (192, (128, 128)), (100, ())]
    return {
        f"{shape}/{number}": torch.full(shape, float(number))
        for count, shape in sizes
        for number in range(count)
    }


def save_replicated(path):
    return penstock.save(path, replicated())


# The tests.


def test_states_in_every_layout_come_back_bit_for_bit(jobs, disk_path):
    path = disk_path / "ckpt"
    reports = jobs.of(4).call(save, path)
    assert [report.rank for report in reports] == [0, 1, 2, 3]
    assert {report.world_size for report in reports} == {4}
    assert len({report.checkpoint_id for report in reports}) == 1
    for load in (load_without_into, load_into, load_into_whole, load_keys):
        jobs.of(4).call(load, path)


def test_one_process_loads_what_four_saved(jobs, disk_path):
    path = disk_path / "ckpt"
    jobs.of(4).call(save, path)
    for number in range(5):
        state = penstock.load(path, rank=number)
        assert_same(state["d"], whole_dtensors())
        assert_same(state["p"], as_loaded(plain(number % 4)))
    load_into_whole(path)
    assert penstock.verify(path).ok


def test_four_ranks_load_what_one_process_saved(jobs, disk_path):
    path = disk_path / "ckpt"
    penstock.save(path, {"d": whole_dtensors(), "p": plain(0)})
    jobs.of(4).call(load_dtensors_into, path)
    jobs.of(4).call(load_into_whole, path)
    assert penstock.inspect(path).world_size == 1


RESHARDED = [(4, 2), (2, 4), (1, 4), (4, 3), (3, 2)]


@pytest.mark.parametrize(("savers", "loaders"), RESHARDED, ids=[f"{a}to{b}" for a, b in RESHARDED])
def test_any_number_of_ranks_loads_what_any_number_saved(jobs, disk_path, savers, loaders):
    path = disk_path / "ckpt"
    if savers == 1:
        save_by_all(path)
    else:
        jobs.of(savers).call(save_by_all, path)
    jobs.of(loaders).call(load_by_all, path)
    assert penstock.inspect(path).world_size == savers


def test_a_rank_reads_what_it_needs(jobs, disk_path):
    """Each rank needs a quarter of a big tensor's rows, plus the rest of its digest chunks."""
    path = disk_path / "ckpt"
    penstock.save(path, {"big": values("big", BIG)})
    for report in jobs.of(4).call(load_rows, path):
        assert report.bytes == 8 * MIB
        assert report.bytes_read <= 10 * MIB
    jobs.of(4).call(save_columns, path)
    for report in jobs.of(4).call(load_rows, path):
        assert report.bytes == 8 * MIB
        assert report.bytes_read <= 16 * MIB


def test_a_replicated_state_is_written_once_and_by_all(jobs, disk_path):
    """64 MiB in tensors of all sizes, the largest of them 16 MiB."""
    reports = jobs.of(4).call(save_replicated, disk_path / "ckpt")
    written = [report.tensor_bytes for report in reports]
    whole = sum(tensor.nbytes for tensor in replicated().values())
    assert sum(written) == whole
    assert max(written) <= 1.3 * whole / 4
    assert_same(penstock.load(disk_path / "ckpt"), replicated())


def test_what_replicas_hold_is_written_once(jobs, disk_path):
    reports = jobs.of(4).call(save_dtensors, disk_path / "ckpt")
    unique = sum(values(name, one.shape, one.dtype).nbytes for name, one in LAYOUTS.items())
    assert sum(report.tensor_bytes for report in reports) == unique
