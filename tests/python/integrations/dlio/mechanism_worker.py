"""Two ranks of DLIO's mechanism: promises that one rank alone cannot show, on rank 0 printed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from dlio_programs import TINY_HERE, mechanism, tensors_of
from mpi4py import MPI

import penstock
from penstock.errors import CorruptCheckpointError, RankError
from penstock.integrations.dlio.states import states_of

WORLD = MPI.COMM_WORLD


def shard_of(path, rank):
    (found,) = path.glob(f"shard-{rank:05}-*.safetensors")
    return found


def refusal(work):
    """The error of this rank, once all ranks are there."""
    WORLD.barrier()
    try:
        work()
    except penstock.PenstockError as error:
        return error
    finally:
        WORLD.barrier()
    return None


def main() -> None:
    directory = Path(sys.argv[1])
    ours = mechanism(directory, *TINY_HERE)
    rank, held = WORLD.rank, []
    path = directory / "checkpoints" / "global_epoch1_step7"
    found = tensors_of(states_of(ours, rank))
    for tensor in found.values():
        tensor.fill_(rank + 1)

    ours.save_checkpoint(1, 7)
    for tensor in found.values():
        tensor.zero_()
    ours.load_checkpoint(1, 7)
    assert all((tensor == rank + 1).all() for tensor in found.values())
    held.append("each rank loads what it saved")

    if rank == 0:
        assert penstock.verify(path).ok
        stored = penstock.load(path)
        assert sorted(stored) == ["rank_0", "rank_1"]
        assert all((tensor == 2).all() for tensor in tensors_of(stored["rank_1"]).values())
        held.append("penstock verifies and loads all of it")

    WORLD.barrier()
    if rank == 1:
        with open(shard_of(path, 1), "r+b") as file:
            file.seek(-2000, os.SEEK_END)
            file.write(b"\xa5" * 8)
    error = refusal(lambda: ours.load_checkpoint(1, 7))
    assert type(error) is (CorruptCheckpointError if rank == 1 else RankError), repr(error)
    assert "shard-00001" in str(error)
    held.append("a damaged file of one rank is an error of both")

    ours.save_checkpoint(1, 7)
    kept = penstock.inspect(path).id
    WORLD.barrier()
    if rank == 1:
        name = next(iter(ours.optimization_state))
        ours.optimization_state[name] = torch.empty(8, device="meta")
    error = refusal(lambda: ours.save_checkpoint(1, 7))
    assert isinstance(error, penstock.PenstockError), repr(error)
    assert rank == 1 or type(error) is RankError, repr(error)
    assert penstock.inspect(path).id == kept
    held.append("a rank that cannot save leaves the checkpoint that is there")

    if rank == 0:
        sys.stdout.write(f"HELD {json.dumps(held)}\n")


main()
