"""What a benchmark says first: its sentences, before any table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.common.console import console
from penstock_bench.report.headline import NOTE, headlines

if TYPE_CHECKING:
    from penstock_bench.results.results import Results


def print_headlines(results: Results) -> None:
    """Prints them, with what is in brackets."""
    out, told = console(), headlines(results)
    for line in told:
        out.print(line, style="bold")
    if any("[" in line for line in told):
        out.print(NOTE, style="dim")
    if told:
        out.print()
