"""Steps of an optimizer whose state is on storage, in a process of their own."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock import offload
from penstock_bench.harness.process import launch_alone
from penstock_bench.peers import AIO

WIDTH = 4096
STATE_BYTES = 12
"""State of a parameter: a master and two moments in float32."""
_WARM_UP = 2


@dataclass(frozen=True)
class Task:
    """One process.

    Parameters are matrices of `WIDTH` x `WIDTH` in bfloat16, a layer each.
    """

    kind: str
    directory: str
    layers: int
    memory_bytes: int
    steps: int

    @property
    def state_bytes(self) -> int:
        """Of all parameters."""
        return self.layers * WIDTH * WIDTH * STATE_BYTES


def run(task: Task) -> dict[str, Any]:
    """The steps; of Penstock a checkpoint, too."""
    torch.manual_seed(0)
    return _ours(task) if task.kind == "penstock" else _zero_infinity(task)


def _ours(task: Task) -> dict[str, Any]:
    ones = [
        torch.nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))
        for _ in range(task.layers)
    ]
    for one in ones:
        one.grad = torch.randn_like(one)
    directory = Path(task.directory)
    optimizer = offload.AdamW(
        ones, directory=directory / "state", memory_bytes=task.memory_bytes, masters=True
    )
    seconds, cpu_seconds = _timed(optimizer.step, task.steps)
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, **_checkpoint(optimizer, directory)}
    optimizer.close()
    return found


def _checkpoint(optimizer: Any, directory: Path) -> dict[str, Any]:
    """A save of the state, and how ZeRO-Infinity takes a checkpoint: a copy of its directory."""
    state = optimizer.state_dict()
    begun = time.perf_counter()
    report = penstock.save(directory / "checkpoint", {"optimizer": state})
    linked = time.perf_counter() - begun
    files = {one.file.path for some in state["state"].values() for one in _in_files(some)}
    copy = directory / "copy"
    copy.mkdir()
    begun = time.perf_counter()
    for path in sorted(files):
        target = copy / Path(path).name
        shutil.copyfile(path, target)
        with target.open("rb+") as file:
            os.fsync(file.fileno())
    copied = time.perf_counter() - begun
    return {"save_seconds": linked, "copy_seconds": copied, "save_bytes": report.bytes}


def _in_files(moments: dict[str, Any]) -> list[Any]:
    return [value for value in moments.values() if hasattr(value, "file")]


def _zero_infinity(task: Task) -> dict[str, Any]:
    """ZeRO-3 with its optimizer on storage, read and written in its pipeline."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if task.kind == "deepspeed-ours":
        from penstock.integrations import deepspeed as ours

        ours.enable()
    import deepspeed

    launch_alone()
    deepspeed.init_distributed("gloo")
    config = _config(task)
    with deepspeed.zero.Init(config_dict_or_path=config):
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(task.layers)]
        model = torch.nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    batch = torch.randn(1, WIDTH, dtype=torch.bfloat16)
    seconds = []
    cpu_seconds = 0.0
    for index in range(_WARM_UP + task.steps):
        engine.backward(engine(batch).float().square().mean())
        begun, used = time.perf_counter(), time.process_time()
        engine.step()
        if index >= _WARM_UP:
            seconds.append(time.perf_counter() - begun)
            cpu_seconds += time.process_time() - used
    engine.destroy()
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def _config(task: Task) -> dict[str, Any]:
    # A tile takes a master, two moments and a gradient, and there are two tiles at a time.
    tile = min(task.memory_bytes // (2 * 16), task.layers * WIDTH * WIDTH)
    tile = max(tile // (WIDTH * WIDTH), 1) * WIDTH * WIDTH
    place = {
        "device": "nvme",
        "nvme_path": str(Path(task.directory) / "zero"),
        "pipeline_read": True,
        "pipeline_write": True,
        "buffer_count": 12,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": place, "sub_group_size": tile},
        "aio": AIO,
    }


def _timed(step: Any, steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and of the processor for all, after some that do not count."""
    seconds = []
    for _ in range(_WARM_UP):
        step()
    used = time.process_time()
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return seconds, time.process_time() - used
