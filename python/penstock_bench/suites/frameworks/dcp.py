"""How long training waits for `dcp.save` and `dcp.async_save`, with `enable` and without.

    .venv/bin/python -m penstock_bench.suites.frameworks.dcp --directory DIR

One process, one state on the host, all four ways by turns in each round. Each saves twice, to a
directory that is removed each time, and the second one counts: a run saves more than once. What
counts is the time that the call takes; the time until the checkpoint is there is told as well.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from typing import TYPE_CHECKING, Any

import click
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from penstock.integrations.dcp import enable
from penstock_bench.suites.frameworks.waits import WAIT, Found, by_turns, command

if TYPE_CHECKING:
    from pathlib import Path

_WAYS = ("save", "save, installed", "async_save", "async_save, installed")


@command("save", "async_save", rounds_usual=5)
@click.option("--size-gb", type=click.FloatRange(min=0.001), default=0.5, show_default=True)
@click.option("--tensor-mb", type=click.FloatRange(min=0.001), default=16.8, show_default=True)
def main(place: Path, rounds: int, size_gb: float, tensor_mb: float) -> tuple[str, Found]:
    """Save with DCP's `save` and `async_save`, without Penstock and with `enable`."""
    warnings.simplefilter("ignore")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    elements = round(tensor_mb * 1e6 / 4)
    layers = max(1, round(size_gb * 1e9 / (4 * elements)))
    state = {f"layer.{index}": torch.randn(elements) for index in range(layers)}

    def measured(way: str, _: int) -> dict[str, float]:
        with enable() if way.endswith("installed") else contextlib.nullcontext():
            # A run saves more than once: the second save counts.
            _measured(way, state, place / "checkpoint")
            return _measured(way, state, place / "checkpoint")

    found = by_turns(_WAYS, rounds, measured)
    dist.destroy_process_group()
    return f"{layers} tensors of {tensor_mb:g} MB", found


def _measured(way: str, state: dict[str, Any], path: Path) -> dict[str, float]:
    """Seconds of the call, and until the checkpoint is durable."""
    began = time.perf_counter()
    pending: Any = None
    if way.startswith("async_save"):
        pending = async_save(state, checkpoint_id=path)
    else:
        save(state, checkpoint_id=path)
    returned = time.perf_counter()
    if pending is not None:
        pending.result()
    ended = time.perf_counter()
    shutil.rmtree(path)
    return {WAIT: returned - began, "durable": ended - began}


if __name__ == "__main__":
    main()
