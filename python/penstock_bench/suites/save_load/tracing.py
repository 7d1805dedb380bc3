"""What a trace costs: saves and loads of one state with and without one, in turns.

`.venv/bin/python -m penstock_bench.suites.save_load.tracing` prints the ratios of the times and of
the processor times, with a trace to without, in intervals at 99 %.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

import penstock
from penstock.common.machine.quiesce import settle
from penstock_bench.harness import cache, memory
from penstock_bench.harness.durable import files_below
from penstock_bench.harness.options import ROOT
from penstock_bench.results import ratios
from penstock_bench.suites.save_load.child import memory_to_touch
from penstock_bench.workloads import states

if TYPE_CHECKING:
    from penstock_bench.workloads.content import StateSpec

FIGURES = ("save", "load", "processor time of a save", "processor time of a load")

CONFIDENCE = 0.99


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size-gib", default=2.0, show_default=True, help="Of the Llama state.")
@click.option("--rounds", default=21, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), default=ROOT / ".cache" / "bench")
def main(size_gib: float, rounds: int, directory: Path) -> None:
    """Measure durable saves and cold loads with and without a trace."""
    directory.mkdir(parents=True, exist_ok=True)
    spec = states.describe("llama", int(size_gib * states.GIB))
    state = spec.nested()
    measured: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for index in range(rounds):
        # Neither always comes first.
        for traced in (False, True) if index % 2 else (True, False):
            measured[traced].append(_measure(spec, state, directory, traced))
    trace_bytes = (directory / "trace.json").stat().st_size
    shutil.rmtree(directory / "tracing")
    (directory / "trace.json").unlink()
    out = Console(highlight=False)
    columns = (zip(*measured[traced], strict=True) for traced in (False, True))
    for name, before, after in zip(FIGURES, *columns, strict=True):
        found = ratios.of_rounds(before, after, CONFIDENCE)
        out.print(
            f"{name} with a trace / without: {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
        )
    out.print(f"trace of both: {trace_bytes / 1e6:.1f} MB for {2 * spec.nbytes / 1e9:.1f} GB moved")


def _measure(spec: StateSpec, state: Any, directory: Path, traced: bool) -> tuple[float, ...]:
    """The seconds of a save and of a load, and their processor times."""
    path, trace = directory / "tracing", directory / "trace.json"
    shutil.rmtree(path, ignore_errors=True)
    settle(directory)
    # What it takes to begin and to end the file is not part of a save.
    with penstock.trace(trace) if traced else contextlib.nullcontext():
        began = _clocks()
        penstock.save(path, state, no_dist=True)
        saved = _since(began)
        cache.drop(files_below(path))
        settle(directory)
        memory.touch(memory_to_touch(spec))
        began = _clocks()
        loaded = penstock.load(path)
        read = _since(began)
        del loaded
    return (saved[0], read[0], saved[1], read[1])


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    now = _clocks()
    return now[0] - began[0], now[1] - began[1]


if __name__ == "__main__":
    main()
