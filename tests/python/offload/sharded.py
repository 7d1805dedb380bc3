"""A sharded model that ranks save together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from towers import Tower

import penstock

if TYPE_CHECKING:
    from pathlib import Path


def save_sharded(path: Path, dim: int) -> None:
    """Saves a tower on all ranks, sharded along a dimension if that is long enough."""
    torch.manual_seed(1)
    model = Tower()
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))

    def cut(tensor: torch.Tensor) -> DTensor:
        is_cut = tensor.dim() > dim
        return distribute_tensor(tensor, mesh, [Shard(dim) if is_cut else Replicate()])

    state = {name: cut(one.detach()) for name, one in model.state_dict().items()}
    penstock.save(path, {"model": state, "step": 3})
