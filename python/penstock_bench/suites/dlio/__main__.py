"""The command behind `make dlio` and `make bench SUITE=dlio`."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock_bench.harness import storage, tables
from penstock_bench.harness.options import ROOT
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.harness.tables import Bar
from penstock_bench.results.samples import Sample, Samples
from penstock_bench.results.spread import plain, spread
from penstock_bench.suites.dlio.program import Program, ProgramError, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Group

    from penstock_bench.suites.dlio.program import Timed

PENSTOCK, SYNCED, ITS_OWN = "penstock", "torch.save-synced", "torch.save"
_MECHANISMS = {
    PENSTOCK: "penstock.integrations.dlio.Checkpointing",
    SYNCED: "penstock_bench.suites.dlio.synced.SyncedTorchSave",
    ITS_OWN: "",
}
_WORDS = {
    PENSTOCK: "direct I/O, durable and compared with digests",
    SYNCED: "DLIO's own mechanism, with a sync of each file after it is written",
    ITS_OWN: "as DLIO runs with `fsync: True`, which it does not read; only its syncs are counted",
}
SAVE, LOAD = "save", "load"

_ENVIRONMENT = ROOT / ".cache" / "dlio-venv"
_CHECKPOINTS, _QUICK_CHECKPOINTS = 10, 2
_RANKS = 2
_LAYERS, _VOCABULARY = 1, 8000
_TINY = Shape(_RANKS, layers=1, vocabulary=1000, hidden=512, ffn=1024)
_FREE_TIMES_STATE = 1.2
_SAVE_BAR, _LOAD_BAR = 2.0, 1.5
_SECONDS_BETWEEN_MAX = 30
_GIB = 1 << 30
_BYTES_PER_PARAMETER = 14
_WHOLE_RANKS = 8
_QUERIES_PER_KEY = 4


@suite("dlio", (PENSTOCK, SYNCED), "Which mechanisms", preload=[], rounds_usual=3)
@click.option(
    "--environment",
    type=click.Path(path_type=Path),
    default=_ENVIRONMENT,
    help="Where DLIO and MPI are installed. [.cache/dlio-venv]",
)
@click.option("--checkpoints", type=click.IntRange(min=1), help="Saves, then loads, of a run. [10]")
@click.option("--layers", type=click.IntRange(1, 32), default=_LAYERS, show_default=True)
@click.option("--vocabulary", type=click.IntRange(1), default=_VOCABULARY, show_default=True)
def main(
    run: Run, environment: Path, checkpoints: int | None, layers: int, vocabulary: int
) -> Report:
    """Run DLIO's checkpoint benchmark, with its own mechanism and with ours."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise click.ClickException(f"{environment} has no DLIO: make dlio-environment installs it")
    count = checkpoints or (_QUICK_CHECKPOINTS if run.is_quick else _CHECKPOINTS)
    shape = _TINY if run.is_quick else Shape(_RANKS, layers, vocabulary)
    with run.at_work(
        _FREE_TIMES_STATE * count * _bytes(shape), checkpoints=count, shape=asdict(shape)
    ) as place:

        def program(name: str, of_shape: Shape) -> Program:
            return Program(python, _MECHANISMS[name], of_shape, place / name, run.timeout_seconds)

        run.results.extra["syncs"] = syncs = {}
        for name in run.each(_MECHANISMS, lambda one: f"syncs: {one}"):
            syncs[name] = _syncs(program(name, _TINY))
        for index, name in run.in_rounds(run.names):
            _turn(run.results, program(name, shape), name, index)
    return Report(_tables(run), _derived(run.results))


def _bytes(shape: Shape) -> int:
    """About the bytes of a checkpoint of all ranks that run."""
    h = shape.hidden
    block = 2 * h * h + 2 * h * (h // _QUERIES_PER_KEY) + 3 * h * shape.ffn
    parameters = 2 * shape.vocabulary * h + shape.layers * block
    return _BYTES_PER_PARAMETER * parameters * shape.ranks // _WHOLE_RANKS


def _syncs(program: Program) -> int | str:
    """The syncs of one checkpoint, or why they were not counted."""
    if shutil.which("strace") is None:
        return "not counted: strace is not installed"
    try:
        return program.syncs()
    except ProgramError as error:
        return f"not counted: {error}"
    finally:
        program.clear()


def _turn(results: Samples[Sample], program: Program, name: str, index: int) -> None:
    """Saves all checkpoints in one run, and loads them in another."""
    count = results.settings["checkpoints"]
    try:
        if _measure(results, Sample(name, index, SAVE), lambda: program.save(count)):
            ended = time.perf_counter()
            storage.drop(program.files)
            resident = storage.resident_fraction(program.files)
            if _measure(results, Sample(name, index, LOAD), lambda: program.load(count)):
                results.samples[-1].detail |= {
                    "resident_before": resident,
                    "seconds_between": time.perf_counter() - ended - results.samples[-1].seconds,
                }
    finally:
        program.clear()


def _measure(results: Samples[Sample], sample: Sample, work: Callable[[], Timed]) -> bool:
    """Adds what a run has taken; returns whether it succeeded."""
    try:
        timed = work()
    except ProgramError as error:
        results.add(sample, {"error": str(error)})
        return False
    figures: dict[str, Any] = {
        "nbytes": timed.total_bytes,
        "seconds": sum(timed.seconds),
        "each_seconds": list(timed.seconds),
        "mean_of_rates": timed.mean_of_rates,
    }
    results.add(sample, figures)
    return True


def _bars(results: Samples[Sample]) -> list[Bar]:
    return [
        Bar(f"{operation}: {PENSTOCK} / {SYNCED}", _ratio(results, operation), bar)
        for operation, bar in ((SAVE, _SAVE_BAR), (LOAD, _LOAD_BAR))
    ]


def _ratio(results: Samples[Sample], operation: str) -> Any:
    return results.ratio(PENSTOCK, SYNCED, figure="gb_per_second", operation=operation)


def _tables(run: Run) -> Group:
    results = run.results
    shape, count = results.settings["shape"], results.settings["checkpoints"]
    sizes = [one.nbytes / count for one in results.samples if one.error is None]
    size = f"{max(sizes) / _GIB:.3f} GiB" if sizes else "nothing"
    title = (
        f"DLIO under MPI, {shape['ranks']} of 8 ranks of Llama 3 8B with {shape['layers']} of 32 "
        f"layers, {shape['vocabulary']:,} of 128,256 tokens, width {shape['hidden']}: {size} a "
        f"checkpoint, {count} saves, then {count} loads, in {run.rounds} interleaved rounds; "
        "median [least, most]"
    )
    unofficial = "sizes of --quick" if run.is_quick else None
    return tables.page(
        results,
        tables.figures(title, list(_COLUMNS), {name: _cells(results, name) for name in run.names}),
        *tables.notes(results.errors(), _WORDS),
        "",
        tables.figures(
            "Syncs of the files and directories of a checkpoint, as strace counts them",
            ["syncs"],
            {name: [str(syncs)] for name, syncs in results.extra["syncs"].items()},
        ),
        *_rules(results),
        "",
        tables.bars(_bars(results), unofficial),
    )


_COLUMNS = (
    "save, s",
    "save, GiB/s\nbytes / time",
    "save, GiB/s\nmean of rates",
    "load, s",
    "load, GiB/s\nbytes / time",
    "load, GiB/s\nmean of rates",
)


def _cells(results: Samples[Sample], name: str) -> list[str]:
    cells = []
    for operation in (SAVE, LOAD):
        good = results.good(name, operation=operation)
        each = spread(seconds for one in good for seconds in one.detail["each_seconds"])
        rates = spread(one.nbytes / one.seconds / _GIB for one in good)
        means = spread(one.detail["mean_of_rates"] for one in good)
        cells += [tables.cell(found) for found in (each, rates, means)]
    return cells


def _rules(results: Samples[Sample]) -> list[str]:
    """How far the run kept MLPerf Storage's rules."""
    loads = [one for one in results.samples if one.operation == LOAD and one.error is None]
    if not loads:
        return []
    resident = max(one.detail["resident_before"] for one in loads)
    between = max(one.detail["seconds_between"] for one in loads)
    return [
        f"  files in the page cache before the loads, at most: {resident:.1%}",
        f"  seconds from the saves to the loads, start of DLIO included, at most: {between:.0f}"
        f" (MLPerf Storage's rules allow {_SECONDS_BETWEEN_MAX} between two runs)",
        "  seconds are those of the slowest rank (rank_sync)",
    ]


def _derived(results: Samples[Sample]) -> dict[str, Any]:
    return {
        "ratios": {one: plain(_ratio(results, one)) for one in (SAVE, LOAD)},
        "bars": [one.as_json(is_judged=not results.settings["is_quick"]) for one in _bars(results)],
    }


if __name__ == "__main__":
    main()
