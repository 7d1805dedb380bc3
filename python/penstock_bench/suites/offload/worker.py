"""Moves a tensor from or to a file, in a process of its own."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.offload import Buffers, TensorIO, wait_all

if TYPE_CHECKING:
    from collections.abc import Callable

READ, WRITE = "read", "write"
# Of one move, a third of a second at these rates, what came just before is too large a part.
TIMES = 4
_WARM_UP_BYTES = 64 << 20
_CHUNK_BYTES = 64 << 20
_SWEEP_RUNS = 2
_LATENCY_READS = 4000
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Setting:
    """How bytes are moved.

    The last two are DeepSpeed's ``single_submit`` and ``overlap_events``.
    """

    block_bytes: int
    depth: int
    threads: int
    is_single: bool = False
    is_overlapped: bool = True

    def __str__(self) -> str:
        words = [f"{self.block_bytes >> 10} KiB x {self.depth}, {self.threads} threads"]
        words += ["single_submit"] * self.is_single + ["overlap_events"] * self.is_overlapped
        return ", ".join(words)


@dataclass(frozen=True)
class Task:
    """One process.

    Attributes:
        library: ``penstock`` or ``deepspeed``.
        operation: `READ` or `WRITE`.
        path: The file, as long as the tensor.
        nbytes: Of the file, in whole 64 MiB.
        memory_bytes: Of the tensor, which is moved over and over where it is shorter.
        is_pinned: Whether the tensor lies in memory of the library's own, else in PyTorch's.
        settings: One, or all that are to be tried; none: the defaults.
    """

    library: str
    operation: str
    path: str
    nbytes: int
    memory_bytes: int
    is_pinned: bool
    settings: tuple[Setting, ...] = ()


def grid(block_bytes: int) -> tuple[Setting, ...]:
    """The settings of DeepSpeed's own sweep at a block size, for the cores of this machine."""
    threads = [count for count in (1, 2, 4, 8) if count <= 2 * (os.cpu_count() or 1)]
    flags = (False, True)
    points = itertools.product((32, 128), threads, flags, flags)
    return tuple(Setting(block_bytes, *point) for point in points)


def run(task: Task) -> dict[str, Any]:
    """Seconds and processor seconds of moving the tensor `TIMES` times, one after the other."""
    tensor, mover = _prepared(task, task.settings[0] if task.settings else None)
    wall, used = _timed(lambda: [mover(tensor) for _ in range(TIMES)])
    if task.operation == READ and task.memory_bytes == task.nbytes:
        _check(tensor)
    return {"seconds": wall, "cpu_seconds": used}


def sweep(task: Task) -> dict[str, Any]:
    """Seconds of every setting, the better of two runs."""
    tensor, _ = _prepared(task, task.settings[0])
    found = []
    for setting in task.settings:
        mover = _mover(task, setting, task.path)
        found.append(min(_timed(partial(mover, tensor))[0] for _ in range(_SWEEP_RUNS)))
    return {"seconds": found}


def latency(task: Task) -> dict[str, Any]:
    """Seconds of a read of one page anywhere, with nothing else going on: the median."""
    places = np.random.default_rng(1).integers(0, task.nbytes // _PAGE_BYTES, _LATENCY_READS)
    found = []
    with TensorIO() as io:
        tensor = Buffers(1 << 21).empty(_PAGE_BYTES, torch.uint8)
        with io.open(task.path) as file:
            for place in places.tolist():
                begun = time.perf_counter()
                io.read(tensor, file, place * _PAGE_BYTES).result()
                found.append(time.perf_counter() - begun)
    return {"seconds": float(np.median(found[_LATENCY_READS // 10 :]))}


def fill(task: Task) -> dict[str, Any]:
    """Writes the file that is read, and written over, and a smaller one to warm up with."""
    with TensorIO() as io:
        for path, nbytes in ((task.path, task.nbytes), (_aside(task), _WARM_UP_BYTES)):
            for begin in range(0, nbytes, _CHUNK_BYTES):
                io.write(_content(begin), path, begin, sync=True).result()
    return {}


def _content(begin: int) -> Any:
    """The content of a chunk that begins at an offset: different in every page."""
    words = np.arange(begin // 8, (begin + _CHUNK_BYTES) // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def _aside(task: Task) -> str:
    return task.path + ".aside"


def _prepared(task: Task, setting: Setting | None) -> tuple[Any, Callable[[Any], None]]:
    """A tensor in memory that is in place, and what moves it, which has done so before."""
    if not task.is_pinned:
        tensor = torch.empty(task.memory_bytes, dtype=torch.uint8)
    elif task.library == "deepspeed":
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = AsyncIOBuilder().load().aio_handle()
        # It has to outlive its memory.
        _kept.append(handle)
        tensor = handle.new_cpu_locked_tensor(task.memory_bytes, torch.empty(0, dtype=torch.uint8))
    else:
        tensor = Buffers(task.memory_bytes + (2 << 20)).empty(task.memory_bytes, torch.uint8)
    # Writes store the content that the file has already, so that reads can be checked.
    for begin in range(0, task.memory_bytes, _CHUNK_BYTES):
        part = tensor.numpy()[begin : begin + _CHUNK_BYTES]
        part[:] = _content(begin) if task.operation == WRITE else 0
    mover = _mover(task, setting, task.path)
    _mover(task, setting, _aside(task))(tensor[:_WARM_UP_BYTES])
    return tensor, mover


_kept: list[Any] = []


def _mover(task: Task, setting: Setting | None, path: str) -> Callable[[Any], None]:
    if task.library == "deepspeed":
        return _their_mover(task, setting, path)
    if setting is None:
        io = TensorIO()
    else:
        io = TensorIO(
            extent_bytes=setting.block_bytes, queue_depth=setting.depth, io_threads=setting.threads
        )
    begin = io.read if task.operation == READ else io.write
    nbytes = task.nbytes if path == task.path else _WARM_UP_BYTES

    def move(tensor: Any) -> None:
        places = range(0, nbytes, tensor.nbytes)
        reports = wait_all([begin(tensor, path, place) for place in places])
        assert sum(report.nbytes for report in reports) == nbytes

    return move


def _their_mover(task: Task, setting: Setting | None, path: str) -> Callable[[Any], None]:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    op = AsyncIOBuilder().load()
    if setting is None:
        handle = op.aio_handle()
    else:
        handle = op.aio_handle(
            setting.block_bytes,
            setting.depth,
            setting.is_single,
            setting.is_overlapped,
            setting.threads,
        )
    begin = handle.sync_pread if task.operation == READ else handle.sync_pwrite

    def move(tensor: Any) -> None:
        assert begin(tensor, path) == 1

    return move


def _timed(move: Callable[[], object]) -> tuple[float, float]:
    begun, used = time.perf_counter(), time.process_time()
    move()
    return time.perf_counter() - begun, time.process_time() - used


def _check(tensor: Any) -> None:
    """That what was read is what the file holds, where it was asked for."""
    for begin in range(0, tensor.numel(), _CHUNK_BYTES):
        if not np.array_equal(tensor.numpy()[begin : begin + _CHUNK_BYTES], _content(begin)):
            raise RuntimeError(f"other bytes were read than are stored, from {begin} on")
