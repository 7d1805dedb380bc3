"""The work of one of many ranks before a save: it flattens its state and plans.

The other ranks are not there: PyTorch's fake process group says that they are, so meshes and
`DTensor` are those of a job of that size. Nothing is communicated and nothing written.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock import _native
from penstock.checkpoint.layout.sharding import Sharder
from penstock.checkpoint.ranks.group import Ranks
from penstock.checkpoint.ranks.mailbox import Mailbox
from penstock.checkpoint.ranks.round import Vote
from penstock.checkpoint.saving.sharded import flatten_sharded
from penstock.common.machine.quiesce import quiesce
from penstock.errors import RankError
from penstock.tensors.arguments import to_native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from penstock.checkpoint.ranks.members import Members

WORLDS = (1, 16, 256, 4096, 16_384, 100_000)
CASES = {
    "sharded": "all by rows over all ranks, 8 shapes",
    "mixed": "half by rows over all ranks; half over a mesh of (ranks / 8, 8), of these most "
    "replicated over its first dimension; 8 shapes",
    "distinct": "as mixed, but no two of one shape",
    "large": "as mixed, 32 MiB on each rank, so that replicas cut boxes up to share them",
}
_GROUP = 8
_REPEATS = 5
_STEP = 1024


@dataclass(frozen=True)
class Task:
    """A plan to make."""

    case: str
    ranks: int
    tensors: int
    directory: str


def run(task: Task) -> dict[str, Any]:
    """Times it several times."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=task.ranks)
    state = make(task)
    options = to_native(None)
    path = str(Path(task.directory) / "planned")
    quiesce(Path(task.directory))
    spreads, jobs = [], []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        flat = flatten_sharded(state, Sharder(0, range(task.ranks)), _no_holders)
        spreads.append(time.perf_counter() - began)
        began = time.perf_counter()
        job = _native.Job(
            path,
            flat.tensors,
            flat.aliases,
            flat.tree,
            options=options,
            arena=None,
            lazy=True,
            nice=None,
        )
        jobs.append(time.perf_counter() - began)
        job.cancel()
    dist.destroy_process_group()
    vote_bytes, plain_bytes = _gathered_bytes(task.ranks)
    return {
        "first_seconds": spreads[0] + jobs[0],
        "spread_seconds": statistics.median(spreads),
        "job_seconds": statistics.median(jobs),
        "pieces": len(flat.tensors),
        # Bytes that a rank sends for its vote, keys included, and those that rank 0 receives.
        "vote_bytes": vote_bytes,
        "plain_bytes": plain_bytes,
        "gather_bytes": vote_bytes * task.ranks,
    }


def _no_holders(hashes: Sequence[int]) -> list[Members]:
    if hashes:
        raise AssertionError("there are no plain tensors in these states")
    return []


class _Counted(Mailbox):
    """Counts what is put."""

    sent_bytes = 0

    def put(self, name: str, text: str) -> None:
        self.sent_bytes += len(self.key(name)) + len(text)
        super().put(name, text)


def _gathered_bytes(ranks: int) -> tuple[int, int]:
    """Bytes that the last rank sends for its vote, and for its plain tensors."""
    mailbox = _Counted(HashStore(), "penstock/" + "0" * 12)
    one = Ranks(lambda: mailbox, ranks - 1, range(ranks)).enter("step", 0)
    # Others wait for the key that a rank puts when it enters; rank 0 does not gather it.
    come_bytes = mailbox.sent_bytes
    most = (1 << 64) - 1
    one.cast(Vote(most, most, most, most, has_pieces=False))
    vote_bytes = mailbox.sent_bytes - come_bytes
    with suppress(RankError):
        one.holders([1])
    return vote_bytes, mailbox.sent_bytes - come_bytes - vote_bytes


def make(task: Task) -> dict[str, DTensor]:
    """The state of rank 0."""
    line = init_device_mesh("cpu", (task.ranks,))
    inner = min(_GROUP, task.ranks)
    plane = init_device_mesh("cpu", (task.ranks // inner, inner))
    layouts: list[tuple[DeviceMesh, Sequence[Placement]]] = [(line, [Shard(0)])]
    if task.case != "sharded":
        layouts = [
            (line, [Shard(0)]),
            (plane, [Replicate(), Shard(0)]),
            (line, [Shard(0)]),
            (plane, [Replicate(), Shard(1)]),
            (line, [Shard(0)]),
            (plane, [Replicate(), Replicate()]),
            (line, [Shard(0)]),
            (plane, [Shard(0), Shard(1)]),
        ]
    longest = max(math.prod(_local_shape(task.case, index)) for index in range(task.tensors))
    memory = torch.empty(longest + task.tensors * _STEP)
    state = {}
    for index in range(task.tensors):
        mesh, placements = layouts[index % len(layouts)]
        rows, columns = _local_shape(task.case, index)
        shape = _global_shape((rows, columns), mesh, placements)
        # Nothing is read: they may overlap, as long as no two are the same.
        local = memory.as_strided((rows, columns), (columns, 1), index * _STEP)
        state[f"layers.{index}.weight"] = DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )
    return state


def _local_shape(case: str, index: int) -> tuple[int, int]:
    if case == "large":
        return 8192, 1024
    if case == "distinct":
        return 1 + index % 100, 16 + index // 100
    return 1 + index % 8, 16


def _global_shape(
    local: tuple[int, int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, int]:
    shape = list(local)
    for pieces, placement in zip(mesh.shape, placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= pieces
    return shape[0], shape[1]
