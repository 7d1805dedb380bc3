"""`penstock trace`: the commands that read traces."""

from __future__ import annotations

import click

from penstock.cli.examples import example
from penstock.cli.group import LazyGroup


@click.group(
    cls=LazyGroup,
    prefix="trace_",
    helps={
        "merge": "Write the traces FILES of several processes to OUTPUT, to be looked at together.",
        "summary": "Tell where the time went in FILES, one of each process.",
    },
    epilog=example("penstock trace summary trace.json"),
)
def trace() -> None:
    """Sum up traces of PENSTOCK_TRACE=FILE, or of penstock.trace(file)."""
