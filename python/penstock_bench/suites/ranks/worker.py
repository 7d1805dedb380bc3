"""One rank of an operation, in a process of its own."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import memory, storage
from penstock_bench.harness.storage import files_below, sync_tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

State = dict[str, torch.Tensor]

_TENSORS = 64
_COLUMNS = 1024
_TOY_BYTES = 1 << 20
# A rank that died has to be missed before the process is stopped.
_TIMEOUT = timedelta(minutes=10)

warnings.filterwarnings("ignore", "torch.distributed is disabled")


@dataclass(frozen=True)
class Task:
    """The work of a rank.

    The size is that of the state of all ranks together, about. One rank alone has nothing to do
    with `torch.distributed`.
    """

    library: str
    threads: int
    operation: str
    rank: int
    ranks: int
    size_bytes: int
    directory: str
    port: int
    is_checked: bool


def run(task: Task) -> dict[str, Any]:
    """Does it: the time is from the moment when all ranks are ready until all are done."""
    mesh = None
    if task.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{task.port}",
            rank=task.rank,
            world_size=task.ranks,
            timeout=_TIMEOUT,
        )
        mesh = init_device_mesh("cpu", (task.ranks,))
    directory = Path(task.directory)
    warm_up = directory.with_name(f"{directory.name}-warm-up-{task.operation}-{task.ranks}")
    toy = make(_TOY_BYTES, mesh)
    save(task, warm_up, toy)
    _meet()
    load(task, warm_up, toy)
    if task.operation == "save":
        state = make(task.size_bytes, mesh)
    else:
        state = make(task.size_bytes, mesh, is_empty=True)
    if task.rank == 0:
        _prepare(task, directory)
    _meet()
    began = time.perf_counter()
    if task.operation == "save":
        save(task, directory, state)
    else:
        load(task, directory, state)
    _meet()
    if task.operation == "save" and task.rank == 0:
        sync_tree(directory)
    seconds = time.perf_counter() - began
    if task.operation == "load" and task.is_checked:
        _require_equal(state, make(task.size_bytes, mesh))
    if mesh is not None:
        dist.barrier()
        dist.destroy_process_group()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return {"seconds": seconds, "nbytes": nbytes}


def make(size_bytes: int, mesh: DeviceMesh | None, *, is_empty: bool = False) -> State:
    """This rank's part of the state: tensors that are sharded along their rows."""
    rows = max(1, size_bytes // (_TENSORS * _COLUMNS * 4))
    # An uneven number of rows is not what anybody has.
    rows = max(rows - rows % 64, 64)
    pattern = torch.rand(_COLUMNS, generator=torch.Generator().manual_seed(1))
    state: State = {}
    for index in range(_TENSORS):
        first, last = 0, rows
        if mesh is not None:
            each = rows // mesh.size()
            first, last = each * mesh.get_rank(), each * (mesh.get_rank() + 1)
        local = torch.empty(last - first, _COLUMNS)
        if not is_empty:
            torch.mul(pattern, torch.arange(first + 1, last + 1).unsqueeze(1) + index, out=local)
        if mesh is None:
            state[f"layer.{index}"] = local
        else:
            state[f"layer.{index}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def save(task: Task, directory: Path, state: State) -> None:
    """Saves with all ranks."""
    if task.library == "penstock":
        import penstock

        penstock.save(directory, state, no_dist=task.ranks == 1)
        return
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(directory, thread_count=task.threads, sync_files=True)
    save(state, storage_writer=writer, no_dist=task.ranks == 1)


def load(task: Task, directory: Path, state: State) -> None:
    """Fills what each rank has."""
    if task.library == "penstock":
        import penstock

        penstock.load(directory, into=state)
        return
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, storage_reader=FileSystemReader(directory), no_dist=task.ranks == 1)


def _prepare(task: Task, directory: Path) -> None:
    """The state of the machine before an operation; see ../README.md."""
    quiesce(directory.parent)
    if task.operation == "load":
        storage.drop_everything(files_below(directory))
    memory.touch(task.size_bytes + task.size_bytes // 8)


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _require_equal(loaded: State, expected: State) -> None:
    for name, tensor in expected.items():
        found = loaded[name]
        if isinstance(tensor, DTensor) and isinstance(found, DTensor):
            tensor, found = tensor.to_local(), found.to_local()
        if not torch.equal(found, tensor):
            raise AssertionError(f"{name} is not what was saved")
