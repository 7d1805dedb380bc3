"""The cost of a trace: saves and loads of one state with and without one, in turns.

`.venv/bin/python -m penstock_bench.suites.save_load.tracing` prints the ratios of the times and of
the processor times, with a trace to without, in intervals at 99 %.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click
from rich.console import Console

import penstock
from penstock_bench.harness.options import directory_option, size_option
from penstock_bench.results import ratios
from penstock_bench.suites.save_load.child import save_and_load
from penstock_bench.workloads import states

if TYPE_CHECKING:
    from pathlib import Path

FIGURES = ("save", "load", "processor time of a save", "processor time of a load")

CONFIDENCE = 0.99


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@size_option
@click.option("--rounds", default=21, show_default=True)
@directory_option
def main(size_gib: float, rounds: int, directory: Path) -> None:
    """Measure durable saves and cold loads with and without a trace."""
    directory.mkdir(parents=True, exist_ok=True)
    trace = directory / "trace.json"
    spec = states.describe("llama", int(size_gib * states.GIB))
    state = spec.nested()
    measured: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for index in range(rounds):
        # Neither always comes first.
        for traced in (False, True) if index % 2 else (True, False):
            # The file is begun and ended outside of the times of the save.
            with penstock.trace(trace) if traced else contextlib.nullcontext():
                costs = save_and_load(directory / "tracing", state, spec)
            measured[traced].append(
                (*(one.seconds for one in costs), *(one.cpu_seconds for one in costs))
            )
    trace_bytes = trace.stat().st_size
    trace.unlink()
    out = Console(highlight=False)
    columns = (zip(*measured[traced], strict=True) for traced in (False, True))
    for name, before, after in zip(FIGURES, *columns, strict=True):
        found = ratios.of_rounds(before, after, CONFIDENCE)
        out.print(
            f"{name} with a trace / without: {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
        )
    out.print(f"trace of both: {trace_bytes / 1e6:.1f} MB for {2 * spec.nbytes / 1e9:.1f} GB moved")


if __name__ == "__main__":
    main()
