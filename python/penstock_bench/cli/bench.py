"""`penstock bench`: the commands that measure storage, and what becomes of what was measured."""

from __future__ import annotations

import click

from penstock.cli.examples import example
from penstock.cli.group import LazyGroup


@click.group(
    cls=LazyGroup,
    package="penstock_bench.cli",
    prefix="bench_",
    helps={
        "checkpoint": "Save and load the state of a model in DIRECTORY, with a process for each "
        "rank.",
        "compare": "Tell whether the run AFTER is slower than the run BEFORE.",
        "gather": "Gather rows by id in DIRECTORY, from a table that does not fit into memory.",
        "io": "Measure requests of every kind in DIRECTORY.",
        "report": "Show RESULTS on one PAGE of HTML.",
        "stream": "Generate text in DIRECTORY with a model that does not fit into memory.",
    },
    epilog=example("penstock bench checkpoint /checkpoints --report page.html"),
)
def bench() -> None:
    """Measure storage, and compare the results."""
