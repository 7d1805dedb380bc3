"""Small training runs under FSDP, tensor parallelism and both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    if shape not in _meshes:
        names = ("data", "tensor")[: len(shape)]
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape]


class Run:
    """A model and its optimizer, after some steps.

    Args:
        kind: ``"plain"``, ``"fsdp"``, ``"tp"`` or ``"fsdp+tp"``.
        seed: Seed of the parameters and the data.
        steps: Number of steps.
    """

    def __init__(self, kind: str, seed: int, steps: int = 2) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.Linear(8, 5))
        size = dist.get_world_size() if dist.is_initialized() else 1
        if kind == "tp":
            parallelize_module(model, _mesh((size,)), PLAN)
        elif kind == "fsdp":
            fully_shard(model[0], mesh=_mesh((size,)))
            fully_shard(model, mesh=_mesh((size,)))
        elif kind == "fsdp+tp":
            mesh = _mesh((2, size // 2))
            parallelize_module(model, mesh["tensor"], PLAN)
            fully_shard(model, mesh=mesh["data"])
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
        for _ in range(steps):
            self.step()

    def step(self) -> float:
        """Runs one step; returns the loss before it."""
        torch.manual_seed(5)
        loss = self.model(torch.randn(4, 6)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def state(self) -> dict[str, Any]:
        """Returns model and optimizer as PyTorch gives them."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def resume(self, state: dict[str, Any]) -> None:
        """Restores a loaded state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def gathered(state: Any) -> Any:
    """Returns a state with whole tensors; all ranks have to call it."""
    if isinstance(state, DTensor):
        return state.full_tensor().detach()
    if isinstance(state, torch.Tensor):
        return state.detach()
    if isinstance(state, dict):
        return type(state)((key, gathered(value)) for key, value in state.items())
    if isinstance(state, list):
        return [gathered(value) for value in state]
    return state
