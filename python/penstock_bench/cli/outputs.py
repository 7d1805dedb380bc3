"""Where benchmarks write what they measured: `--output` and `--report`.

What cannot be written is refused before anything is measured for it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import click

from penstock.common.console import PATH
from penstock.errors import MissingDependencyError
from penstock_bench.report import require_libraries, write_report

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.results.results import Results


def writable(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """A file that can be written; what is there stays as it is."""
    if path is None:
        return None
    was_there = os.path.lexists(path)
    try:
        # Permissions alone do not tell: a file system may be read-only, a user may be root.
        with open(path, "ab"):
            pass
        if not was_there:
            # Other ranks of the same command may look at the same time.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}") from error
    return path


def page(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """A file that a report can be written to."""
    if path is not None:
        try:
            require_libraries()
        except MissingDependencyError as error:
            raise click.UsageError(str(error)) from error
    return writable(context, parameter, path)


def check_distinct(*paths: Path | None) -> None:
    """Refuses two outputs to one file, of which only the last would be left."""
    given = [path.resolve() for path in paths if path is not None]
    for number, path in enumerate(given):
        if path in given[:number]:
            raise click.UsageError(f"{path} would be written twice: choose a file for each")


def write(results: Results, output: Path | None, report: Path | None) -> None:
    """Writes what was measured to where it was asked for."""
    if output is not None:
        results.write(output)
    if report is not None:
        write_report(results, report)


output_option = click.option(
    "--output", type=PATH, callback=writable, help="Write the results there, as JSON."
)

report_option = click.option(
    "--report", type=PATH, callback=page, help="Write a page of tables and plots there, as HTML."
)
