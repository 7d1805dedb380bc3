"""States of `DTensor`s in every layout, as each rank has them and whole."""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import penstock
from compare import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor import Placement


class Layout(NamedTuple):
    """Mesh, placements, shape and dtype of a tensor."""

    mesh: Any
    placements: list[Placement]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


LINE = [0, 1, 2, 3]
GRID = [[0, 1], [2, 3]]
# Before PyTorch 2.5 there is no placement for a dimension that another one cuts first.
STRIDED = None if _StridedShard is None else _StridedShard(0, split_factor=2)

LAYOUTS = {
    "rows": Layout(LINE, [Shard(0)], (8, 3)),
    "uneven": Layout(LINE, [Shard(0)], (5, 2)),
    "columns": Layout(LINE, [Shard(1)], (3, 10)),
    "last": Layout(LINE, [Shard(2)], (2, 1, 9)),
    "same": Layout(LINE, [Replicate()], (7, 5)),
    "scalar": Layout(LINE, [Replicate()], ()),
    "empty": Layout(LINE, [Shard(0)], (0, 3)),
    "hollow": Layout(LINE, [Shard(0)], (6, 0)),
    "one": Layout(LINE, [Shard(0)], (1,)),
    "grid": Layout(GRID, [Shard(0), Shard(1)], (5, 7)),
    "hybrid": Layout(GRID, [Replicate(), Shard(0)], (9, 2)),
    "hybrid_turned": Layout(GRID, [Shard(0), Replicate()], (9, 2)),
    "cube": Layout([[[0, 1]], [[2, 3]]], [Shard(1), Replicate(), Shard(0)], (3, 4, 2)),
    "cube_turned": Layout([[[0], [1]], [[2], [3]]], [Shard(0), Shard(2), Shard(1)], (3, 4, 5)),
    "order": Layout([3, 1, 0, 2], [Shard(0)], (10, 2)),
    "low": Layout([0, 1], [Shard(0)], (9, 2)),
    "high": Layout([2, 3], [Shard(1)], (2, 9)),
    "high_same": Layout([3, 2], [Replicate()], (4, 4)),
    "lone": Layout([2], [Shard(0)], (3, 3)),
    "bfloat16": Layout(LINE, [Shard(0)], (6, 3), torch.bfloat16),
    "float8": Layout(LINE, [Shard(1)], (6, 3), torch.float8_e4m3fn),
    "complex128": Layout(GRID, [Shard(1), Shard(0)], (3, 5), torch.complex128),
    "bool": Layout(LINE, [Shard(0)], (13,), torch.bool),
    "int8": Layout(GRID, [Shard(0), Replicate()], (5, 3), torch.int8),
    "int64": Layout(GRID, [Replicate(), Replicate()], (5,), torch.int64),
}
if STRIDED is not None:
    LAYOUTS |= {
        "nested": Layout(GRID, [Shard(0), Shard(0)], (11, 3)),
        "fsdp_tp": Layout(GRID, [STRIDED, Shard(0)], (8, 4)),
        "fsdp_tp_uneven": Layout(GRID, [STRIDED, Shard(0)], (7, 4)),
        "interleaved": Layout(GRID, [STRIDED, Replicate()], (9, 4)),
    }


def values(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor of arbitrary bits that depend on its name."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape, np.uint8)).bool()
    data = torch.from_numpy(generator.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8))
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage()).view(tuple(shape))


@cache
def _mesh(text: str) -> DeviceMesh:
    # It makes process groups, so once per process.
    return DeviceMesh("cpu", eval(text))


def part_of(
    whole: torch.Tensor, placements: Sequence[Placement], mesh: Sequence[int], where: Sequence[int]
) -> torch.Tensor:
    """Returns the part that PyTorch places at a coordinate of a mesh."""
    for placement, pieces, index in zip(placements, mesh, where, strict=True):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(whole, pieces, with_padding=False, contiguous=False)
            whole = parts[index]
    return whole


def distribute(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Makes a `DTensor` from each rank's part of a whole, without communication."""
    where = mesh.get_coordinate()
    local = torch.empty(0, dtype=whole.dtype)
    if where is not None:
        local = part_of(whole, placements, mesh.shape, where).clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def sharded(name: str, layout: Layout) -> DTensor:
    """Returns a tensor with this rank's part."""
    whole = values(name, layout.shape, layout.dtype)
    return distribute(whole, _mesh(str(layout.mesh)), layout.placements)


def dtensors() -> dict[str, Any]:
    """Returns `DTensor`s in all layouts on this rank, some of them tied."""
    state: dict[str, Any] = {name: sharded(name, layout) for name, layout in LAYOUTS.items()}
    return {**state, "tied": [state["rows"], {"again": state["nested"]}]}


def whole_dtensors() -> dict[str, Any]:
    """Returns the state of `dtensors` with whole tensors."""
    state: dict[str, Any] = {
        name: values(name, layout.shape, layout.dtype) for name, layout in LAYOUTS.items()
    }
    return {**state, "tied": [state["rows"], {"again": state["nested"]}]}


def plain(rank: int, name: str = "") -> dict[str, Any]:
    """Returns plain tensors: replicated ones and their ties, and values of each rank.

    Args:
        rank: Rank that the state belongs to.
        name: Changes all values.
    """
    weight = values(f"{name}weight", (30, 7))
    generator = torch.Generator().manual_seed(rank)
    state: OrderedDict[Any, Any] = OrderedDict()
    state["weight"] = weight
    state["tied"] = weight
    state["views"] = (weight.t(), weight[3:9], [weight[:, 2], weight.view(-1)])
    state[0] = {"exp_avg": values(f"{name}exp_avg", (30, 7)), "step": torch.tensor(3.0)}
    state[(1, "x")] = [values(f"{name}half", (9,), torch.bfloat16), torch.empty(0, 4)]
    state["turned"] = values(f"{name}turned", (6, 4)).t()
    state["rank"] = rank
    state["array"] = np.full(5, rank)
    state["long"] = bytes([rank]) * 5_000
    state["random"] = generator.get_state()
    state["own"] = penstock.PerRank({"loss": torch.full((rank + 1,), rank), "text": f"of {rank}"})
    return {"plain": state, "step": 7}


def as_loaded(state: Any) -> Any:
    """Returns a state as it is loaded without ``into=``: `PerRank` matters to the save alone."""
    if isinstance(state, penstock.PerRank):
        return state.value
    if type(state) is OrderedDict:
        return OrderedDict((key, as_loaded(value)) for key, value in state.items())
    if isinstance(state, dict):
        return {key: as_loaded(value) for key, value in state.items()}
    return state


def cleared(state: Any) -> Any:
    """Returns a target with other values: same ties, same layouts."""
    return _Clearing().clear(as_loaded(state))


class _Clearing:
    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def clear(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = self._tensor(value)
            return self._tensors[id(value)]
        if isinstance(value, np.ndarray):
            return np.zeros_like(value)
        if isinstance(value, dict):
            return type(value)((key, self.clear(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return type(value)(self.clear(item) for item in value)
        return type(value)()

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor):
            mesh, placements, shape = value.device_mesh, value.placements, value.shape
            local = self._tensor(value.to_local())
            return DTensor.from_local(
                local, mesh, placements, run_check=False, shape=shape, stride=value.stride()
            )
        storage = value.untyped_storage()
        other = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        if storage.nbytes():
            other = self._storages.setdefault(storage.data_ptr(), other)
        found = torch.empty(0, dtype=value.dtype).set_(other)
        return found.as_strided(value.shape, value.stride(), value.storage_offset())


def local_bytes(state: Any) -> list[bytes]:
    """Returns the elements of all tensors in order; for `DTensor`s the local ones."""
    if isinstance(state, DTensor):
        is_mine = state.device_mesh.get_coordinate() is not None
        return [tensor_bytes(state.to_local()) if is_mine else b""]
    if isinstance(state, torch.Tensor | np.ndarray):
        return [tensor_bytes(state)]
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        return [found for item in state for found in local_bytes(item)]
    return []


def rank() -> int:
    """Returns this process's rank."""
    return dist.get_rank()
