"""The command behind `make bench SUITE=updates`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from penstock.common.machine.limits import LimitError, limited
from penstock.common.machine.quiesce import settle
from penstock_bench.harness import machine, process, progress
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.options import (
    QUICK_ROUNDS,
    ROOT,
    ROUNDS,
    common,
    names_option,
    output_directory,
    show,
)
from penstock_bench.harness.running import rotated
from penstock_bench.suites.updates import report, worker
from penstock_bench.suites.updates.results import WRITERS, Results, Sample
from penstock_bench.suites.updates.worker import ROW_BYTES, Task

if TYPE_CHECKING:
    from pathlib import Path

_ROWS, _QUICK_ROWS = 4_000_000, 100_000
_MEMORY_BYTES = 512 << 20
_BATCH_ROWS, _BATCHES, _FLUSHES, _QUICK_FLUSHES = 4096, 8, 4, 1
_FREE_TIMES = 8

process.preload("penstock_bench.suites.updates.worker")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@names_option("--only", "names", tuple(WRITERS), "Who writes, separated by commas")
@common
@click.option("--timeout", default=900.0, show_default=True, help="Seconds for one process.")
def main(
    names: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    directory: Path,
    output: Path | None,
    timeout: float,
) -> None:
    """Rows of a table larger than memory, written anew and made durable."""
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    rows = _QUICK_ROWS if quick else _ROWS
    results = Results(
        machine=machine.describe(ROOT),
        disk=machine.disk(directory),
        settings={
            "command": sys.argv[1:],
            "rounds": rounds or (QUICK_ROUNDS if quick else ROUNDS),
            "rows": rows,
            "row_bytes": ROW_BYTES,
            "batch_rows": _BATCH_ROWS,
            "batches": _BATCHES,
            "flushes": _QUICK_FLUSHES if quick else _FLUSHES,
        },
    )
    with workplace(directory, _FREE_TIMES * rows * ROW_BYTES) as place:
        _measure(results, names, place, timeout)
    where = output_directory(output)
    results.write(where / "updates.json")
    show(report.render(results), where, "updates")


def _measure(results: Results, names: tuple[str, ...], place: Path, timeout: float) -> None:
    settings = results.settings
    chosen = [name for name in WRITERS if name in names]

    def task(name: str, group: str | None, seed: int) -> Task:
        return Task(
            name,
            str(place / name),
            group,
            rows=settings["rows"],
            batch_rows=settings["batch_rows"],
            batches=settings["batches"],
            flushes=settings["flushes"],
            seed=seed,
        )

    with progress.shown(len(chosen) * (1 + settings["rounds"]), "tables") as tell:
        broken: dict[str, str] = {}
        for name in chosen:
            tell(f"table of {name}", 0)
            (made,) = process.run(worker.prepare, [task(name, None, 0)], place, timeout)
            if "error" in made:
                broken[name] = made["error"]
            tell("", 1)
        for index in range(settings["rounds"]):
            for name in rotated(chosen, index):
                tell(f"round {index + 1}: {name}", 0)
                settle(place)
                found: dict[str, Any] = {"error": broken[name]} if name in broken else {}
                with contextlib.ExitStack() as stack:
                    group = None
                    try:
                        limit = stack.enter_context(limited(_MEMORY_BYTES))
                        group = str(limit.processes)
                        settings["memory"] = f"{_MEMORY_BYTES >> 20} MiB, by a control group"
                    except LimitError as error:
                        settings["memory"] = f"not limited: {error}"
                    if not found:
                        tasks = [task(name, group, index + 1)]
                        (found,) = process.run(worker.run, tasks, place, timeout)
                results.samples.append(_sample(settings, name, index, found))
                tell("", 1)


def _sample(settings: dict[str, Any], name: str, index: int, found: dict[str, Any]) -> Sample:
    if "error" in found:
        return Sample(name, index, error=str(found["error"]))
    written = settings["batch_rows"] * settings["batches"] * settings["flushes"]
    return Sample(
        name,
        index,
        rate=written / found["seconds"],
        cpu_seconds=found["cpu_seconds"] / written * 1e6,
        fold_seconds=found.get("fold_seconds", 0.0),
    )


if __name__ == "__main__":
    main()
