"""What a trace costs: saves and loads of one state with and without one, in turns.

`.venv/bin/python -m benches.tracing` prints the ratio of the times, with a trace to without.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console

import penstock
from benches import states
from benches.child import memory_to_touch
from benches.machine import touch_memory
from benches.options import ROOT
from penstock.bench import cache
from penstock.bench.durable import files_below
from penstock.bench.rest import settle

if TYPE_CHECKING:
    from penstock.bench.content import StateSpec


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size-gib", default=2.0, show_default=True, help="Of the Llama state.")
@click.option("--rounds", default=21, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), default=ROOT / ".cache" / "bench")
def main(size_gib: float, rounds: int, directory: Path) -> None:
    """Measure durable saves and cold loads with and without a trace."""
    directory.mkdir(parents=True, exist_ok=True)
    spec = states.describe("llama", int(size_gib * states.GIB))
    state = spec.nested()
    ratios = []
    for index in range(rounds):
        # Neither always comes first.
        order = (False, True) if index % 2 else (True, False)
        seconds = {traced: _measure(spec, state, directory, traced) for traced in order}
        ratios.append(np.divide(seconds[True], seconds[False]))
    trace_bytes = (directory / "trace.json").stat().st_size
    shutil.rmtree(directory / "tracing")
    (directory / "trace.json").unlink()
    out = Console(highlight=False)
    for name, column in zip(("save", "load"), np.array(ratios).T, strict=True):
        low, middle, high = np.percentile(column, (25, 50, 75))
        out.print(f"{name} with a trace / without: {middle:.3f}, quartiles {low:.3f} to {high:.3f}")
    out.print(f"trace of both: {trace_bytes / 1e6:.1f} MB for {2 * spec.nbytes / 1e9:.1f} GB moved")


def _measure(spec: StateSpec, state: Any, directory: Path, traced: bool) -> tuple[float, float]:
    path, trace = directory / "tracing", directory / "trace.json"
    shutil.rmtree(path, ignore_errors=True)
    settle(directory)
    # What it takes to begin and to end the file is not part of a save.
    with penstock.trace(trace) if traced else contextlib.nullcontext():
        began = time.perf_counter()
        penstock.save(path, state)
        saved = time.perf_counter() - began
        cache.drop(files_below(path))
        settle(directory)
        touch_memory(memory_to_touch(spec))
        began = time.perf_counter()
        loaded = penstock.load(path)
        seconds = time.perf_counter() - began
        del loaded
    return saved, seconds


if __name__ == "__main__":
    main()
