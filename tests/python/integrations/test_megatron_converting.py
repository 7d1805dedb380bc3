"""`penstock convert` from and to Megatron-Core's own checkpoints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

megatron = pytest.importorskip("megatron.core.dist_checkpointing")

import penstock  # noqa: E402
from megatrons import assert_loaded, load, on_cpu, save, state, strategy, whole  # noqa: E402
from penstock.checkpoint.converting.distributed.torch_dist import boxes  # noqa: E402
from penstock.errors import (  # noqa: E402
    CheckpointExistsError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsupportedStateError,
)
from penstock.integrations.megatron import SaveStrategy, enable  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def save_own(path):
    save(state(2), path, strategy(is_parallel=True))


def load_at(path, tensor_parallel, is_enabled):
    """Loads on all ranks, at another geometry, by Megatron-Core alone or through the plug-in."""
    on_cpu()
    into = state(tensor_parallel, is_blank=True)
    if dist.get_world_size() == 1:
        # There is one object for each rank that saved.
        into["rng"] = []
    if is_enabled:
        with enable():
            found = load(into, path, strict="raise_unexpected")
    else:
        # PyTorch 2.15 has a property of tensors that Megatron-Core's strict loads do not know.
        found = load(into, path)
    if dist.get_world_size() == 1:
        found["rng"] = state(tensor_parallel)["rng"]
    assert_loaded(found, tensor_parallel)


def save_ours(path):
    save(state(2), path, SaveStrategy())


@pytest.fixture(scope="module")
def own(jobs, tmp_path_factory):
    """A checkpoint of Megatron-Core's own, by two ranks."""
    path = tmp_path_factory.mktemp("own") / "iter_0000001"
    # It starts a process that imports PyTorch.
    jobs.of(2).call(save_own, path, timeout_seconds=200)
    return path


@pytest.fixture(scope="module")
def ours(jobs, tmp_path_factory):
    """A checkpoint of the plug-in's, by two ranks."""
    path = tmp_path_factory.mktemp("ours") / "iter_0000001"
    jobs.of(2).call(save_ours, path)
    return path


def test_a_checkpoint_of_megatrons_own_becomes_one_of_the_plug_in(jobs, own, ours, disk_path):
    before = {one.name: one.read_bytes() for one in own.iterdir()}
    report = penstock.convert(own, disk_path / "new")
    assert (report.kind, report.trusted, report.pickled) == ("megatron", (), ())
    assert before == {one.name: one.read_bytes() for one in own.iterdir()}
    assert penstock.verify(disk_path / "new").ok
    found, expected = penstock.load(disk_path / "new"), penstock.load(ours)
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name
    assert found["objects"].keys() == expected["objects"].keys()
    jobs.of(2).call(load_at, disk_path / "new", 1, True)
    jobs.of(1).call(load_at, disk_path / "new", 1, True)


@pytest.mark.parametrize("is_converted", [False, True])
def test_megatron_loads_a_checkpoint_of_ours_without_penstock(
    jobs, own, ours, disk_path, is_converted
):
    source = ours
    if is_converted:
        source = disk_path / "new"
        penstock.convert(own, source)
    report = penstock.convert(source, disk_path / "back", to="megatron")
    assert report.kind == "penstock"
    assert report.bytes == sum(one.stat().st_size for one in (disk_path / "back").iterdir())
    assert not (disk_path / "back" / "manifest.json").exists()
    jobs.of(2).call(load_at, disk_path / "back", 2, False)
    jobs.of(2).call(load_at, disk_path / "back", 1, False)


def test_pieces_are_of_bounded_size():
    for shape, item_bytes, most in (((), 8, 4), ((0, 3), 4, 8), ((7, 3, 5), 2, 32), ((9,), 4, 12)):
        counts = torch.zeros(shape, dtype=torch.int64)
        for start, sizes in boxes(shape, item_bytes, most):
            part = counts
            for dim, (first, size) in enumerate(zip(start, sizes, strict=True)):
                part = part.narrow(dim, first, size)
            part += 1
            assert part.numel() * item_bytes <= most or not shape
        assert (counts == 1).all()


def test_bad_sources_are_refused_by_name(own, ours, disk_path):
    damaged = disk_path / "damaged"
    shutil.copytree(own, damaged)
    file = max(damaged.glob("*.distcp"), key=lambda one: one.stat().st_size)
    data = bytearray(file.read_bytes())
    at = data.index(whole("fc10", 12, 8).numpy().tobytes()[:16])
    data[at + 2] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        penstock.convert(damaged, disk_path / "out")
    os.unlink(file)
    with pytest.raises(IncompleteCheckpointError, match=file.name):
        penstock.convert(damaged, disk_path / "out")
    os.unlink(damaged / ".metadata")
    with pytest.raises(IncompleteCheckpointError, match=r"\.metadata"):
        penstock.convert(damaged, disk_path / "out", kind="megatron")
    penstock.save(disk_path / "plain", {"w": torch.ones(2)})
    with pytest.raises(UnsupportedStateError, match="no checkpoint of Megatron-Core"):
        penstock.convert(disk_path / "plain", disk_path / "out", to="megatron")
    with pytest.raises(CheckpointExistsError, match="is not empty"):
        penstock.convert(ours, disk_path / "plain", to="megatron")
    with pytest.raises(ValueError, match="takes no kind"):
        penstock.convert(ours, disk_path / "out", to="megatron", overwrite=True)
    assert not (disk_path / "out").exists()
    other = disk_path / "other"
    shutil.copytree(ours, other)
    (other / "common.pt").write_bytes(b"of another save")
    with pytest.raises(CorruptCheckpointError, match=r"common\.pt is not the one"):
        penstock.convert(other, disk_path / "out", to="megatron")


def test_the_command_converts_back(ours, disk_path):
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "convert", ours, disk_path / "back", "--to", "megatron"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "is a checkpoint of Megatron-Core with" in " ".join(done.stdout.split())
    assert (disk_path / "back" / ".metadata").exists()
