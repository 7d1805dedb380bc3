"""The command behind `make bench`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from penstock_bench.harness import machine, memory, progress
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
from penstock_bench.suites.save_load import bars, plot, report
from penstock_bench.suites.save_load.results import Results
from penstock_bench.suites.save_load.runner import NAMES, Plan, Runner, Workload
from penstock_bench.workloads import states

if TYPE_CHECKING:
    from pathlib import Path

_SIZE_GIB = 4.0
_QUICK_SIZE_GIB = 1 / 16
_SCALING_GIB = (2.0, 8.0)
_QUICK_SCALING_GIB = (1 / 32, 1 / 8)
# Room for the largest checkpoint, for libraries that store tied tensors twice, and for fio.
_FREE_TIMES_STATE = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@names_option("--states", "state_names", states.NAMES, "States, separated by commas")
@names_option("--only", "names", NAMES, "Contenders, separated by commas")
@click.option("--size-gib", type=click.FloatRange(min=0.001), help="Of the Llama state. [4]")
@click.option("--scaling", is_flag=True, help="Also time saves of 2 GiB and 8 GiB.")
@common
@click.option(
    "--timeout", default=900.0, show_default=True, help="Seconds for one save or load, at most."
)
def main(
    state_names: tuple[str, ...],
    names: tuple[str, ...],
    size_gib: float | None,
    rounds: int | None,
    scaling: bool,
    quick: bool,
    directory: Path,
    output: Path | None,
    timeout: float,
) -> None:
    """Compare Penstock with fio and with other libraries on the same state and disk."""
    size_gib = size_gib or (_QUICK_SIZE_GIB if quick else _SIZE_GIB)
    scaling_sizes = () if not scaling else _QUICK_SCALING_GIB if quick else _SCALING_GIB
    plan = Plan(
        names=names,
        workloads=tuple(
            Workload(name, name, int(size_gib * states.GIB), quick) for name in state_names
        ),
        scaling=tuple(
            Workload(f"scaling-{size:g}-gib", "llama", int(size * states.GIB), quick)
            for size in scaling_sizes
        ),
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        directory=directory.resolve(),
        timeout_seconds=timeout,
        is_quick=quick,
    )
    plan.directory.mkdir(parents=True, exist_ok=True)
    results = _run(plan, is_official=size_gib == _SIZE_GIB and not quick)
    verdicts = bars.judge(results)
    results.bars = [verdict.as_json() for verdict in verdicts]
    where = output_directory(output)
    results.write(where / "bench.json")
    plot.draw(results, where / "bench.png")
    show(report.render(results, verdicts), where, "bench")


def _run(plan: Plan, is_official: bool) -> Results:
    """Measures a plan, with a progress bar on standard error."""
    sizes = {one.label: one.spec() for one in (*plan.workloads, *plan.scaling)}
    largest = max((spec.nbytes for spec in sizes.values()), default=0)
    results = Results(
        machine=machine.describe(ROOT),
        disk=machine.disk(plan.directory),
        settings={
            "command": sys.argv[1:],
            "rounds": plan.rounds,
            "is_official": is_official,
            "is_quick": plan.is_quick,
            "timeout_seconds": plan.timeout_seconds,
        },
        states={
            label: {
                "description": spec.description,
                "bytes": spec.nbytes,
                "tensors": len(spec.tensors),
            }
            for label, spec in sizes.items()
        },
    )
    with (
        workplace(plan.directory, _FREE_TIMES_STATE * largest) as place,
        progress.shown(plan.operations, "touching memory") as tell,
    ):
        results.memory = memory.warm(largest)
        Runner(plan, results, place, tell).run()
    return results


if __name__ == "__main__":
    main()
