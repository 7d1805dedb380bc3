"""Tables that ranks save together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import penstock

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (1000, 24)


def save_cut(path: Path) -> None:
    """Saves a table of counted numbers on all ranks, sharded by rows and by columns."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    table = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
    rows, columns = (distribute_tensor(table, mesh, [Shard(dim)]) for dim in (0, 1))
    penstock.save(path, {"rows": rows, "columns": columns})
