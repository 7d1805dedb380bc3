"""The formats of Megatron-LM and Bridge that call PyTorch's DCP: ``torch_dcp``, ``fsdp_dtensor``.

The calls are those of ``megatron/training/checkpointing.py`` and of Bridge's module of that name.
"""

from __future__ import annotations

import warnings
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import penstock
from penstock.integrations.dcp import enable


def state_of(value, iteration):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(number):
        return distribute_tensor(torch.full((8, 4), number), mesh, [Shard(0)])

    return {
        "args": Namespace(lr=0.5, data_path=["a"]),
        "iteration": iteration,
        "model": {"w": sharded(value)},
        "optimizer": {"state": {"w": {"exp_avg": sharded(value + 1)}}},
        "rng_state": [{"random_rng_state": (3, (1, 2), None)}],
    }


def save_and_load(path):
    """Saves; loads the arguments on rank 0 as at the start, and then everything."""
    with enable(file_system_writer=True), warnings.catch_warnings():
        # Megatron-LM calls names that PyTorch has deprecated.
        warnings.simplefilter("ignore")
        dcp.save(state_dict=state_of(3.0, 7), storage_writer=dcp.FileSystemWriter(path))
        arguments = {"args": None, "iteration": None}
        if dist.get_rank() == 0:
            dcp.load(state_dict=arguments, checkpoint_id=path, no_dist=True)
            assert arguments == {"args": Namespace(lr=0.5, data_path=["a"]), "iteration": 7}
        dist.barrier()
        reader = dcp.FileSystemReader(path)
        assert "model.w" in reader.read_metadata().state_dict_metadata
        into = state_of(0.0, 0)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load_state_dict(state_dict=into, storage_reader=reader, planner=planner)
    assert into["iteration"] == 7
    assert (into["model"]["w"].to_local() == 3).all()
    assert (into["optimizer"]["state"]["w"]["exp_avg"].to_local() == 4).all()


def test_the_calls_of_torch_dcp_and_fsdp_dtensor_go_through_penstock(jobs, disk_path):
    # Not for the ranks, which need nothing of it.
    core = pytest.importorskip("megatron.core.dist_checkpointing")
    path = disk_path / "iter_0000001"
    path.mkdir()
    jobs.of(2).call(save_and_load, path, timeout_seconds=120)
    assert penstock.verify(path).ok
    assert torch.equal(penstock.load(path)["model"]["w"], torch.full((8, 4), 3.0))
    # By these Megatron-LM and Bridge tell the format of a directory.
    assert (path / ".metadata").exists()
    assert not core.check_is_distributed_checkpoint(path)
