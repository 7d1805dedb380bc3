"""One rank of the tests of `penstock.integrations.dcp`: `dcp_worker.py COMMAND…`, by torchrun.

A command is a function below with its arguments, as in ``save:/tmp/x:rows``; they run in order.
Every rank checks its own results, and exits with an error if a promise is broken.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import older_torch  # noqa: F401  names of newer versions, before they are imported

# isort: split
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import penstock
from penstock.errors import CheckpointExistsError, StorageError
from penstock.integrations.dcp import StorageReader, StorageWriter

warnings.filterwarnings("ignore", category=UserWarning)

SHAPES = {"even": (8, 12), "uneven": (7, 5), "few": (3, 2), "deep": (5, 4, 3), "none": (0, 4)}
FAILURE_SECONDS_MAX = 60


def whole(name: str, step: int = 0) -> torch.Tensor:
    """Returns a tensor whose elements depend on its name, their place and the step."""
    shape = SHAPES[name]
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count, dtype=torch.float32) + 1000 * len(name) + step).reshape(shape)


def values(step: int) -> dict[str, Any]:
    return {"step": step, "betas": [0.9, 0.999], "name": "run", "pair": (1, torch.ones(3) * step)}


def lay_out(layout: str) -> tuple[Any, list[Any]]:
    world = dist.get_world_size()
    if layout == "grid":
        return init_device_mesh("cpu", (world // 2, 2)), [Shard(0), Shard(1)]
    if layout == "hybrid":
        return init_device_mesh("cpu", (world // 2, 2)), [Replicate(), Shard(0)]
    mesh = init_device_mesh("cpu", (world,))
    return mesh, {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}[layout]


def make_state(layout: str, step: int = 0, *, is_blank: bool = False) -> dict[str, Any]:
    mesh, placements = lay_out(layout)
    tensors = {name: whole(name, step) for name in SHAPES}
    if is_blank:
        tensors = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
    spread = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in tensors.items()}
    plain = torch.full((6,), -1.0) if is_blank else torch.arange(6.0) + step
    state = {"model": spread, "plain": plain, "groups": [{"t": plain.clone()}, {"lr": 0.5 + step}]}
    kept = {"step": -1, "betas": [], "name": "", "pair": None} if is_blank else values(step)
    return {**state, **kept}


def check(found: Any, expected: Any) -> None:
    """Checks that two states are equal, on any devices."""
    if isinstance(expected, torch.Tensor):
        found, expected = (
            t.full_tensor() if isinstance(t, DTensor) else t for t in (found, expected)
        )
        assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
        assert torch.equal(found, expected), (found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), (list(found), list(expected))
        for key in expected:
            check(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), (found, expected)
        assert len(found) == len(expected), (found, expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    else:
        assert found == expected, (found, expected)


def save(path: str, layout: str, step: str = "0") -> None:
    writer = StorageWriter(path, overwrite=True)
    dcp.save(make_state(layout, int(step)), storage_writer=writer)


def load(path: str, layout: str, step: str = "0") -> None:
    state = make_state(layout, is_blank=True)
    dcp.load(state, storage_reader=StorageReader(path))
    check(state, make_state(layout, int(step)))


def penstock_save(path: str, layout: str) -> None:
    penstock.save(path, make_state(layout), overwrite=True)


def penstock_load(path: str) -> None:
    """Loads whole tensors on every rank, whichever rank wrote them."""
    state = penstock.load(path)
    check({name: state["model"][name] for name in SHAPES}, {name: whole(name) for name in SHAPES})
    check({key: state[key] for key in values(0)}, values(0))


def save_async(path: str, layout: str, kind: str) -> None:
    """Saves twice: the second process-based save reuses the first one's process."""
    # PyTorch before 2.7 has threads only.
    types: Any = AsyncCheckpointerType
    how = {} if types is None else {"async_checkpointer_type": types[kind.upper()]}
    for step in (1, 2):
        writer = StorageWriter(path, overwrite=True)
        state = make_state(layout, step)
        future = dcp.async_save(state, storage_writer=writer, **how)
        for tensor in state["model"].values():
            tensor.to_local().fill_(-2)
        future.result()
        dist.barrier()
        load(path, layout, str(step))
        dist.barrier()


class FailingPlanner(dcp.DefaultSavePlanner):
    """Fails, or dies, when a rank is to write."""

    def __init__(self, rank: int, action: str) -> None:
        super().__init__()
        self.is_due = dist.get_rank() == rank
        self.action = action

    def resolve_data(self, write_item: Any) -> Any:
        if self.is_due and self.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_due:
            raise StorageError("the disk is on fire", path="/dev/fire", errno=5)
        return super().resolve_data(write_item)


def fail(path: str, rank: str) -> None:
    """All ranks raise soon, nothing is committed, and the next save leaves only its own files."""
    before = files(path)
    writer = StorageWriter(path, overwrite=True)
    began = time.monotonic()
    planner = FailingPlanner(int(rank), "raise")
    with pytest.raises(dcp.CheckpointException, match="the disk is on fire") as caught:
        dcp.save(make_state("rows", 9), storage_writer=writer, planner=planner)
    assert time.monotonic() - began < FAILURE_SECONDS_MAX
    failure, _ = caught.value.failures[int(rank)]
    assert isinstance(failure, StorageError), failure
    assert failure.errno == 5
    dist.barrier()
    assert manifest(path) == before["manifest.json"]
    load(path, "columns")
    dist.barrier()
    dcp.save(make_state("rows", 10), storage_writer=writer)
    del writer
    dist.barrier()
    attempts = {name.split(".")[1] for name in files(path) if name != "manifest.json"}
    assert len(attempts) == 1, files(path).keys()
    load(path, "columns", "10")


def die(path: str, rank: str) -> None:
    dcp.save(
        make_state("rows", 9),
        storage_writer=StorageWriter(path, overwrite=True),
        planner=FailingPlanner(int(rank), "die"),
    )


def files(path: str) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in Path(path).iterdir()}


def manifest(path: str) -> bytes:
    return (Path(path) / "manifest.json").read_bytes()


def refuse(path: str) -> None:
    """An existing checkpoint, cached plans, and ranks that would save alone."""
    expect(CheckpointExistsError, path, storage_writer=StorageWriter(path))
    expect(ValueError, path, storage_writer=StorageWriter(path), use_collectives=False)
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    writer = StorageWriter(f"{path}-cached", overwrite=True)
    dcp.save(make_state("rows"), storage_writer=writer, planner=planner)
    expect(ValueError, path, storage_writer=writer, planner=planner)
    load(f"{path}-cached", "columns")


def expect(kind: type[Exception], path: str, **arguments: Any) -> None:
    before = manifest(path)
    with pytest.raises((kind, dcp.CheckpointException)) as caught:
        dcp.save(make_state("rows"), **arguments)
    if isinstance(caught.value, dcp.CheckpointException):
        failures = [failure for failure, _ in caught.value.failures.values()]
        assert any(isinstance(failure, kind) for failure in failures), failures
    dist.barrier()
    assert manifest(path) == before


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7), nn.Linear(7, 3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value)


def make_fsdp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def fsdp_save(path: str) -> None:
    model, optimizer = make_fsdp(1)
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim}, storage_writer=StorageWriter(path))
    expected = {"model": gathered(state), "optim": gathered(optim)}
    if dist.get_rank() == 0:
        Path(f"{path}.expected").write_bytes(pickle.dumps(expected))


def fsdp_load(path: str) -> None:
    model, optimizer = make_fsdp(2)
    state, optim = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optim": optim}, storage_reader=StorageReader(path))
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)
    state, optim = get_state_dict(model, optimizer)
    expected = pickle.loads(Path(f"{path}.expected").read_bytes())
    check({"model": gathered(state), "optim": gathered(optim)}, expected)
    check(penstock.load(path), expected)


def gathered(state: Any) -> Any:
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gathered(value) for value in state]
    return state


def replace(path: str) -> None:
    """Saves one checkpoint over and over until it is killed, alone."""
    for step in itertools.count():
        state = {
            "a": torch.full((300_000,), float(step)),
            "b": [torch.ones(5) * step],
            "step": step,
        }
        dcp.save(state, storage_writer=StorageWriter(path, overwrite=True), no_dist=True)
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()


COMMANDS = {
    function.__name__: function
    for function in (
        *(save, load, penstock_save, penstock_load, save_async, fail, die, refuse),
        *(fsdp_save, fsdp_load, replace),
    )
}


def main() -> None:
    is_alone = "RANK" not in os.environ
    if not is_alone:
        dist.init_process_group("gloo")
    for command in sys.argv[1:]:
        name, *arguments = command.split(":")
        COMMANDS[name](*arguments)
        if not is_alone:
            dist.barrier()
    if not is_alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
