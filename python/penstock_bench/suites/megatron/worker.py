"""One rank that saves and loads a sharded state with `megatron.core`, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import memory, storage
from penstock_bench.harness.measure import measured
from penstock_bench.harness.storage import files_below, sync_tree
from penstock_bench.suites.megatron.checkpoints import Checkpoints
from penstock_bench.workloads.without_gpu import host_for_cuda

if TYPE_CHECKING:
    from collections.abc import Callable

_COLUMNS = 1024
_BYTES_RECEIVED = struct.Struct("=128xQ")
"""``tcpi_bytes_received`` of Linux's ``struct tcp_info``."""


@dataclass(frozen=True)
class Task:
    """The work of a rank.

    Attributes:
        library: Who saves; see `checkpoints.LIBRARIES`.
        is_async: Whether saves run in the background.
        rank: Which rank this is.
        ranks: Number of ranks.
        port: TCP port of the job's store.
        shard_bytes: Size of a rank's tensors.
        tensors: Number of tensors.
        directory: Where checkpoints are written.
        saves: Number of saves.
    """

    library: str
    is_async: bool
    rank: int
    ranks: int
    port: int
    shard_bytes: int
    tensors: int
    directory: str
    saves: int


def run(task: Task) -> dict[str, Any]:
    """Saves some times, then loads cold; returns seconds, memory, and bytes between the ranks.

    Times are from the moment when all ranks are ready until all are done, and all files and their
    directory are synced.
    """
    host_for_cuda()
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{task.port}"
    dist.init_process_group("gloo", init_method=address, rank=task.rank, world_size=task.ranks)
    checkpoints = Checkpoints(task.library, is_parallel=False)
    state = make(task, is_blank=False)
    memory.touch(task.shard_bytes)
    found: dict[str, list[float]] = {"durable": [], "call": [], "peak_bytes": [], "received": []}
    path = ""
    for index in range(task.saves):
        path = os.path.join(task.directory, f"iter_{index:07}")
        if task.rank == 0:
            quiesce(Path(task.directory))
        dist.barrier()
        before = _received_bytes()
        with measured() as cost:
            call, durable = _save(checkpoints, state, path, task)
        found["call"].append(call)
        found["durable"].append(durable)
        found["peak_bytes"].append(cost.peak_growth_bytes)
        found["received"].append(_received_bytes() - before)
    load_seconds = _load(checkpoints, state, path, task)
    checkpoints.close()
    dist.barrier()
    dist.destroy_process_group()
    return {**found, "load_seconds": load_seconds, "nbytes": task.shard_bytes * task.ranks}


def _save(
    checkpoints: Checkpoints, state: dict[str, Any], path: str, task: Task
) -> tuple[float, float]:
    """Saves, and returns the seconds of the call and those until it is durable."""
    began = time.perf_counter()
    if task.is_async:
        checkpoints.begin(state, path)
    else:
        checkpoints.save(state, path)
    call = time.perf_counter() - began
    if task.is_async:
        checkpoints.finish(is_blocking=True)
    dist.barrier()
    if task.rank == 0:
        sync_tree(Path(path))
    dist.barrier()
    return call, time.perf_counter() - began


def _load(checkpoints: Checkpoints, state: dict[str, Any], path: str, task: Task) -> float:
    """Loads into another state, from a cold cache; returns the seconds."""
    into = make(task, is_blank=True)
    if task.rank == 0:
        quiesce(Path(path))
        storage.drop_everything(files_below(Path(path)))
    dist.barrier()
    began = time.perf_counter()
    loaded = checkpoints.load(into, path)
    dist.barrier()
    seconds = time.perf_counter() - began
    for name, saved in state.items():
        if not torch.equal(loaded[name], saved.data):
            raise AssertionError(f"{name} is not what was saved")
    return seconds


def make(task: Task, *, is_blank: bool) -> dict[str, Any]:
    """A rank's rows of each tensor."""
    rows = max(1, task.shard_bytes // (task.tensors * _COLUMNS * 4))
    fill: Callable[[int], torch.Tensor] = (
        (lambda _: torch.zeros(rows, _COLUMNS))
        if is_blank
        else (lambda index: torch.full((rows, _COLUMNS), float(task.rank * 10_000 + index)))
    )
    names = [f"layers.{index}.weight" for index in range(task.tensors)]
    place = (0, task.rank, task.ranks)
    return {
        name: ShardedTensor.from_rank_offsets(name, fill(index), place)
        for index, name in enumerate(names)
    }


def measure_exchange(task: Task) -> dict[str, Any]:
    """Saves by the strategy alone, without Megatron-Core's own checks around it.

    Returns:
        The bytes that this rank received from others: in the first save, and in a later one.
    """
    host_for_cuda()
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{task.port}"
    dist.init_process_group("gloo", init_method=address, rank=task.rank, world_size=task.ranks)
    checkpoints = Checkpoints(task.library, is_parallel=False)
    state = make(task, is_blank=False)
    received = []
    for index in range(2):
        path = Path(task.directory) / f"iter_{index:07}"
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        before = _received_bytes()
        checkpoints.strategy.save(state, path)
        dist.barrier()
        received.append(_received_bytes() - before)
    checkpoints.close()
    dist.barrier()
    dist.destroy_process_group()
    return {"first_received_bytes": received[0], "received_bytes": received[1]}


def _received_bytes() -> int:
    """Bytes that the open TCP connections of this process have received."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                information = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                found += _BYTES_RECEIVED.unpack(information)[0]
    return found
