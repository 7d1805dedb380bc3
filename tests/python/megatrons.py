"""States of `megatron.core.dist_checkpointing` for ranks of tests, on machines without a GPU."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import (
    async_utils,
    filesystem_async,
    fully_parallel,
)
from megatron.core.dist_checkpointing.strategies import torch as strategies

OWN = strategies.TorchDistSaveShardedStrategy
ROWS, COLUMNS, LAYERS = 12, 8, 4


def on_cpu() -> None:
    """Lets Megatron-Core run in a rank of tests.

    Some calls for a GPU, which it makes in any case, do nothing; and it may start processes.
    """
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    cuda: Any = torch.cuda
    if not cuda.is_available():
        cuda.synchronize = lambda *_, **__: None
        cuda.current_device = lambda: "cpu"


def whole(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements the name and the shape determine."""
    first = sum(name.encode()) % 97
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    return (count % 251 + first).reshape(shape).to(dtype)


def part(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    """One of equal parts of a tensor; not contiguous along the second dimension."""
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, index * size, size)


def _swiglu(data: torch.Tensor, rank: int, size: int, replica: int) -> ShardedTensorFactory:
    """The two halves of a gated layer, each cut by tensor parallelism, as one local tensor."""

    def build(key: str, tensor: torch.Tensor, replica: Any, flattened_range: Any = None) -> Any:
        offsets = ((0, rank, 2 * size), (0, rank + size, 2 * size))
        return [
            ShardedTensor.from_rank_offsets(key, half, offset, replica_id=replica)
            for half, offset in zip(tensor.chunk(2), offsets, strict=True)
        ]

    return ShardedTensorFactory("gated", data, build, torch.cat, (0, 0, replica))


def state(tensor_parallel: int, *, is_blank: bool = False, step: int = 0) -> dict[str, Any]:
    """The state of a model of some layers, cut by tensor parallelism, replicated by the rest.

    Args:
        tensor_parallel: Number of ranks that cut a tensor.
        is_blank: Whether the values are those before a load.
        step: Added to all elements.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    tp, dp = rank % tensor_parallel, rank // tensor_parallel

    def sharded(key: str, tensor: torch.Tensor, dim: int | None, layer: int | None = None) -> Any:
        held = tensor if dim is None else part(tensor, dim, tp, tensor_parallel)
        held = torch.zeros_like(held) if is_blank else held + step
        ahead = 0 if layer is None else 1
        offsets = [] if layer is None else [(0, layer, LAYERS)]
        replica = (0, tp if dim is None else 0, dp)
        if dim is not None:
            offsets.append((dim + ahead, tp, tensor_parallel))
        return ShardedTensor.from_rank_offsets(
            key, held, *offsets, replica_id=replica, prepend_axis_num=ahead
        )

    layers = {
        index: {
            "fc1": sharded("layers.fc1", whole(f"fc1{index}", ROWS, COLUMNS), 0, index),
            "fc2": sharded("layers.fc2", whole(f"fc2{index}", ROWS, COLUMNS), 1, index),
            "norm": sharded("layers.norm", whole(f"norm{index}", 5), None, index),
        }
        for index in range(LAYERS)
    }
    gated = whole("gated", 2 * ROWS, 4)
    halves = torch.cat([part(half, 0, tp, tensor_parallel) for half in gated.chunk(2)])
    return {
        "model": {
            "layers": layers,
            "embedding": sharded("embedding", whole("embedding", 16, 4, dtype=torch.bfloat16), 0),
            "gated": _swiglu((halves + step) * (not is_blank), tp, tensor_parallel, dp),
            "step": sharded("step", torch.tensor(7 * (not is_blank)), None),
        },
        "rng": [ShardedObject("rng", None if is_blank else {"rank": rank}, (size,), (rank,))],
        "args": {"lr": 0.5},
    }


def expected(tensor_parallel: int, step: int = 0) -> dict[str, Any]:
    """Returns what a load into `state` has to return."""
    return leaves(state(tensor_parallel, step=step))


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """The values of a nested state by their paths."""
    if isinstance(value, dict) and not name.startswith("rng.0"):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        is_sharded = isinstance(value, ShardedTensor | ShardedObject | ShardedTensorFactory)
        return {name: value.data if is_sharded else value}
    found: dict[str, Any] = {}
    for key, child in items:
        found |= leaves(child, f"{name}.{key}" if name else str(key))
    return found


def assert_loaded(found: Any, tensor_parallel: int, step: int = 0) -> None:
    """Raises unless a load has given every value."""
    found, wanted = leaves(found), expected(tensor_parallel, step)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def strategy(one: Any = None, *, is_parallel: bool = False, **settings: Any) -> Any:
    """A strategy, Megatron-Core's own unless one is given, perhaps wrapped."""
    one = one or OWN("torch_dist", 1)
    wrapper = fully_parallel.FullyParallelSaveStrategyWrapper
    return wrapper(one, **settings) if is_parallel else one


def save(saved: Any, path: str | os.PathLike[str], how: Any = None, **further: Any) -> Any:
    """Saves, in a directory that is there."""
    on_cpu()
    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
    dist.barrier()
    parameters = inspect.signature(dist_checkpointing.save).parameters
    if further.get("async_sharded_save") and "async_strategy" in parameters:
        further.setdefault("async_strategy", "mcore")
    try:
        return dist_checkpointing.save(saved, str(path), how or strategy(), **further)
    finally:
        # Ends the process that a save of Megatron-Core's own has started.
        filesystem_async._results_queue = None


def load(into: Any, path: str | os.PathLike[str], *how: Any, **further: Any) -> Any:
    """Loads."""
    on_cpu()
    return dist_checkpointing.load(into, str(path), *how, **further)


def queue(workers_path: str | os.PathLike[str] | None = None) -> Any:
    """A queue of requests, as that of a trainer.

    Args:
        workers_path: A directory of the test, to make the worker a persistent one, which finds
            there what it needs without a GPU.
    """
    if workers_path is None:
        return async_utils.AsyncCallsQueue()
    with open(os.path.join(workers_path, "sitecustomize.py"), "w") as file:
        file.write(
            "import torch\n"
            "torch.cuda.device_count = lambda: 1\n"
            "torch.cuda.set_device = lambda *_: None\n"
        )
    os.environ["PYTHONPATH"] = f"{workers_path}:{os.environ.get('PYTHONPATH', '')}"
    return async_utils.AsyncCallsQueue(persistent=True)
