"""`penstock bench report`: results as a page of HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli.examples import example
from penstock.common.console import PATH
from penstock_bench.cli import outputs
from penstock_bench.report import write_report
from penstock_bench.results.results import Results

if TYPE_CHECKING:
    from pathlib import Path


@click.command("report", epilog=example("penstock bench report results.json page.html"))
@click.argument("results", type=PATH, nargs=-1, required=True)
@click.argument("page", type=PATH, callback=outputs.page)
def bench_report(results: tuple[Path, ...], page: Path) -> None:
    """Show RESULTS on one PAGE of HTML.

    RESULTS are files of `--output`; several come below each other. PAGE holds everything it shows:
    it needs no network and no script.
    """
    if page.suffix == ".json":
        raise click.UsageError(f"{page} would be overwritten: the page comes last, as PAGE.html")
    write_report([Results.read(path) for path in results], page)
