"""`penstock trace merge`: merges the traces of several processes into one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli.examples import example
from penstock.common.console import PATH, console
from penstock.common.tracing import recorded

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "merge", epilog=example("penstock trace merge all.json trace.rank0.json trace.rank1.json")
)
@click.argument("output", type=PATH)
@click.argument("files", type=PATH, nargs=-1, required=True)
def trace_merge(output: Path, files: tuple[Path, ...]) -> int:
    """Merge the traces FILES of several processes into OUTPUT, to view them together.

    Times are those of each machine's clock.
    """
    if output.exists() and any(file.exists() and output.samefile(file) for file in files):
        raise click.UsageError(f"{output} is one of the traces to merge")
    recorded.merge(list(files), output)
    console().print(f"{output}: {len(files)} traces", soft_wrap=True)
    return 0
