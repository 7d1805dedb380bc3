"""`penstock trace`: the commands that read traces."""

from __future__ import annotations

import click

from penstock.cli.examples import example
from penstock.cli.group import LazyGroup


@click.group(
    cls=LazyGroup,
    prefix="trace_",
    helps={
        "merge": "Merge the traces FILES of several processes into OUTPUT, to view them together.",
        "phases": "Show the phases of a training run: FILES are the traces of all its ranks.",
        "summary": "Show where the time went in FILES, one per process.",
    },
    epilog=example("penstock trace summary trace.json"),
)
def trace() -> None:
    """Summarize traces of PENSTOCK_TRACE=FILE, or of penstock.trace(file)."""
