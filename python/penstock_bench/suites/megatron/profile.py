"""The command behind `make megatron`: the phases of the I/O of a small GPT on four ranks.

The training reads an indexed dataset and saves in three shapes, each by Penstock and by
Megatron-Core's own format: by few writers (the ranks of the first replica), by all ranks, and in
the background. The figures of a shape, as a simulator of storage needs them, are in the JSON file
under ``"preset"``.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from penstock.cli.trace_phases import phase_table, plain, request_table
from penstock.common.tracing import recorded
from penstock.common.tracing.phases import PhaseOfRun, phases
from penstock.common.tracing.summary import CHECKPOINT, COMPUTE
from penstock_bench.harness import tables
from penstock_bench.harness.options import free_port
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample
from penstock_bench.results.spread import spread
from penstock_bench.suites.megatron import run as training
from penstock_bench.suites.megatron.checkpoints import LIBRARIES
from penstock_bench.suites.megatron.gpt import Size, write_dataset

if TYPE_CHECKING:
    from rich.console import RenderableType

RANKS, TENSOR_PARALLEL = 4, 2
SHAPES = {
    "few": "one replica writes: as many writers as ranks that share a layer",
    "all": "the replicas share the writing, as Megatron-LM does by default",
    "async": "as all, in the background",
}
ROWS = tuple(f"{library}, {shape}" for shape in SHAPES for library in LIBRARIES)
_SIZE = Size(layers=4, hidden=256, vocabulary=8192, sequence=256, batch=1)
_QUICK_SIZE = Size(layers=2, hidden=128, vocabulary=1024, sequence=64, batch=1)
_SAMPLES = 2000
_FREE_BYTES = 4 << 30


@suite(
    "megatron-profile",
    ROWS,
    "Who saves, and in which shape",
    preload=["penstock_bench.suites.megatron.run"],
    rounds_usual=1,
    timeout_seconds=900.0,
)
@click.option(
    "--interval", type=click.IntRange(1), default=4, show_default=True, help="Steps per save."
)
@click.option("--saves", type=click.IntRange(2), default=3, show_default=True)
def main(run: Run, interval: int, saves: int) -> Report:
    """Train a small GPT of Megatron-Core on 4 ranks, and show the phases of its I/O."""
    size = _QUICK_SIZE if run.is_quick else _SIZE
    found: dict[str, list[PhaseOfRun]] = {}
    with run.at_work(_FREE_BYTES, interval=interval, saves=saves, size=vars(size)) as place:
        write_dataset(place / "tokens", size, _SAMPLES)
        begins = {library: _begin(run, library, size) for library in LIBRARIES}
        for index, row in run.in_rounds(run.names):
            library, shape = row.split(", ")
            outcomes = _ranks(
                run, library, shape, size,
                begin=begins[library], steps=interval * saves, interval=interval,
            )  # fmt: skip
            failed = [one for one in outcomes if "error" in one]
            run.results.add(Sample(row, index), (failed or outcomes)[0])
            if not failed:
                traces = sorted(place.glob("trace.rank*.json"))
                found[row] = phases([recorded.read(path) for path in traces])
            shutil.rmtree(place / "run", ignore_errors=True)
    return Report(
        _tables(run, found),
        {
            "phases": {row: plain(one) for row, one in found.items()},
            "preset": preset(run, found, size),
        },
    )


def _begin(run: Run, library: str, size: Size) -> str:
    """Saves the checkpoint from which the trainings of a library go on."""
    run.say(f"the first step, saved by {library}")
    outcomes = _ranks(run, library, "all", size, begin=None, steps=1, interval=1)
    if error := next((one["error"] for one in outcomes if "error" in one), None):
        raise click.ClickException(f"{library} cannot save the first step: {error}")
    kept = run.place / f"begin-{library}"
    (run.place / "run" / "iter_0000001").rename(kept)
    return str(kept)


def _ranks(
    run: Run, library: str, shape: str, size: Size, *, begin: str | None, steps: int, interval: int
) -> list[dict[str, Any]]:
    place, port = run.place, free_port()
    tasks = [
        training.Task(
            library=library,
            is_parallel=shape != "few",
            is_async=shape == "async",
            rank=rank,
            ranks=RANKS,
            tensor_parallel=TENSOR_PARALLEL,
            port=port,
            size=size,
            data=str(place / "tokens"),
            directory=str(place / "run"),
            begin=begin,
            trace=str(place / "trace.json") if begin else None,
            steps=steps,
            interval=interval,
        )
        for rank in range(RANKS)
    ]
    return run.children(training.run, tasks, (library, shape, begin))


def preset(run: Run, found: dict[str, list[PhaseOfRun]], size: Size) -> dict[str, Any]:
    """The figures of the workload: of the dataset, and of the checkpoints of each shape.

    Bursts are those of saves after the first one, which finds memory and processes cold.
    """
    shapes = {}
    for row in found:
        last = run.results.good(row)[-1].detail
        nbytes = {int(rank): count for rank, count in last["bytes_by_rank"].items()}
        begins = last["begin_seconds"]
        shapes[row] = {
            "writers": len(nbytes),
            "bytes_per_writer": sorted(nbytes.values()),
            "burst_seconds": statistics.median(last["durable_seconds"][1:]),
            "first_burst_seconds": last["durable_seconds"][0],
            "stall_seconds": statistics.median(last["stall_seconds"][1:]),
            "interval_seconds": statistics.median(
                after - before for before, after in itertools.pairwise(begins)
            ),
            "step_seconds": statistics.median(last["step_seconds"]),
        }
    return {
        "ranks": RANKS,
        "tensor_parallel": TENSOR_PARALLEL,
        "read_bytes": 4 * (size.sequence + 1),
        "reads_per_step": size.batch * RANKS // TENSOR_PARALLEL,
        "shapes": shapes,
    }


def _tables(run: Run, found: dict[str, list[PhaseOfRun]]) -> RenderableType:
    parts: list[RenderableType] = [_shapes(run, found), *tables.notes(run.results.errors(), SHAPES)]
    for row, one in found.items():
        parts += [Text(f"\n{row}", style="bold"), phase_table(one), request_table(one)]
    return tables.page(run.results, *parts)


def _shapes(run: Run, found: dict[str, list[PhaseOfRun]]) -> RenderableType:
    rows = {}
    for row, of_run in found.items():
        samples = run.results.good(row)
        nbytes = sum(samples[-1].detail["bytes_by_rank"].values())
        by_name = {one.name: one for one in of_run}
        stalled = by_name.get(CHECKPOINT)
        rows[row] = [
            str(len(samples[-1].detail["bytes_by_rank"])),
            f"{nbytes / 1e6:.1f}",
            *(
                tables.cell(spread(statistics.median(one.detail[name][1:]) for one in samples))
                for name in ("stall_seconds", "durable_seconds")
            ),
            tables.cell(spread(one.detail["stall_seconds"][0] for one in samples)),
            f"{stalled.share:.1%}" if stalled else "",
            f"{by_name[COMPUTE].share:.1%}",
        ]
    headings = [
        "writers", "MB", "stall s", "durable\nafter s", "stall s,\nfirst save",
        "waits,\nof the run", "computes",
    ]  # fmt: skip
    title = f"A small GPT on {RANKS} ranks, tensor parallel {TENSOR_PARALLEL}: its saves"
    return tables.figures(title, headings, rows, bold="penstock")


if __name__ == "__main__":
    main()
