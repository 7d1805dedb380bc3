"""How long training waits for `dcp.save` and `dcp.async_save`, with `install` and without.

    .venv/bin/python -m penstock_bench.suites.frameworks.dcp --directory DIR

One process, one state on the host, all four ways by turns in each round. Each saves twice, to a
directory that is removed each time, and the second one counts: a run saves more than once. What
counts is the time that the call takes; the time until the checkpoint is there is told as well.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from penstock.integrations.dcp import install

_WAYS = [(name, who) for name in ("save", "async_save") for who in ("DCP", "Penstock")]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--size-gb", type=click.FloatRange(min=0.001), default=0.5, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
def main(directory: Path, size_gb: float, rounds: int) -> None:
    """Save by turns, and print how long each call took."""
    warnings.simplefilter("ignore")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    state = {f"layer.{index}": torch.randn(1 << 22) for index in range(_layers(size_gb))}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory(dir=directory) as work:
        for _ in range(rounds):
            for name, who in _WAYS:
                with install() if who == "Penstock" else contextlib.nullcontext():
                    _measured(name, state, Path(work, "checkpoint"))
                    found[name, who].append(_measured(name, state, Path(work, "checkpoint")))
    dist.destroy_process_group()
    for way, samples in found.items():
        calls, wholes = zip(*samples, strict=True)
        click.echo(f"{way[0]:>10} by {way[1]:8}  call {_told(calls)}  durable {_told(wholes)}")
    for name in ("save", "async_save"):
        theirs, ours = (_median_call(found[name, who]) for who in ("DCP", "Penstock"))
        click.echo(f"{name}: with install {ours / theirs:.2f} of the time without")


def _measured(name: str, state: dict[str, Any], path: Path) -> tuple[float, float]:
    """Seconds that the call took, and seconds until the checkpoint was there."""
    began = time.perf_counter()
    if name == "save":
        save(state, checkpoint_id=path)
        returned = time.perf_counter()
    else:
        pending: Any = async_save(state, checkpoint_id=path)
        returned = time.perf_counter()
        pending.result()
    ended = time.perf_counter()
    shutil.rmtree(path)
    return returned - began, ended - began


def _layers(size_gb: float) -> int:
    return max(1, round(size_gb * 1e9 / (4 << 22)))


def _median_call(samples: list[tuple[float, float]]) -> float:
    return statistics.median(call for call, _ in samples)


def _told(seconds: tuple[float, ...]) -> str:
    return f"{statistics.median(seconds):6.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


if __name__ == "__main__":
    main()
