"""Penstock against itself: saves and loads of one state under different `Options`, interleaved.

`.venv/bin/python -m penstock_bench.suites.save_load.sweep` measures the settings that
docs/maintainers/tuning.md compares; `--options engine=threads,io_threads=2` measures others beside
the defaults.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import penstock
from penstock.common.machine.quiesce import settle
from penstock_bench.harness import cache, memory
from penstock_bench.harness.durable import files_below
from penstock_bench.harness.options import ROOT
from penstock_bench.harness.running import rotated
from penstock_bench.suites.save_load.child import memory_to_touch
from penstock_bench.workloads import states

_SETTINGS = (
    "",
    "io_threads=1",
    "queue_depth=4",
    "queue_depth=32",
    "extent_bytes=4194304,queue_depth=4",
    "extent_bytes=4194304,queue_depth=16",
    "engine=threads",
    "verify=False",
    "direct=off",
)
_WORDS = {"True": True, "False": False}


def parse(text: str) -> dict[str, Any]:
    """Options from ``name=value,…``."""
    pairs = (pair.partition("=") for pair in filter(None, text.split(",")))
    return {
        name: int(value) if value.isdecimal() else _WORDS.get(value, value)
        for name, _, value in pairs
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--options", "settings", multiple=True, metavar="NAME=VALUE,…")
@click.option("--size-gib", default=2.0, show_default=True, help="Of the Llama state.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), default=ROOT / ".cache" / "bench")
def main(settings: tuple[str, ...], size_gib: float, rounds: int, directory: Path) -> None:
    """Measure durable saves and cold loads under different options."""
    chosen = ("", *settings) if settings else _SETTINGS
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "sweep"
    spec = states.describe("llama", int(size_gib * states.GIB))
    state = spec.nested()
    rates: dict[str, list[tuple[float, float]]] = {text: [] for text in chosen}
    for index in range(rounds):
        for text in rotated(chosen, index):
            options = penstock.Options(**parse(text))
            shutil.rmtree(path, ignore_errors=True)
            settle(directory)
            began = time.perf_counter()
            penstock.save(path, state, options=options, no_dist=True)
            saved = time.perf_counter() - began
            cache.drop_everything(files_below(path))
            settle(directory)
            memory.touch(memory_to_touch(spec))
            began = time.perf_counter()
            loaded = penstock.load(path, options=options)
            seconds = time.perf_counter() - began
            del loaded
            rates[text].append((spec.nbytes / saved / 1e9, spec.nbytes / seconds / 1e9))
    shutil.rmtree(path)
    table = Table("options", "save GB/s", "load GB/s", title=spec.description)
    for text, found in rates.items():
        columns = (
            f"{np.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"
            for values in zip(*found, strict=True)
        )
        table.add_row(text or "(defaults)", *columns)
    Console().print(table)


if __name__ == "__main__":
    main()
