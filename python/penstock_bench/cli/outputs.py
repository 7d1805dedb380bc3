"""Where benchmarks write what they measured: `--output` and `--report`.

A file that cannot be written is refused before anything is measured.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import endings
from penstock.common.console import PATH, console, print_json
from penstock.common.machine import facts
from penstock.errors import MissingDependencyError
from penstock_bench.report import require_libraries, write_report
from penstock_bench.report.headline import NOTE, headlines
from penstock_bench.results.results import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock_bench.peers import Entry
    from penstock_bench.results.results import Measurement


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


def started(kind: str, place: Path, settings: dict[str, Any]) -> Results:
    """Results without measurements, of this machine and of the disk of a place."""
    machine, disk = facts.machine(), facts.disk(place)
    return Results(kind=kind, machine=machine, disk=disk, settings=settings)


def installed(names: Sequence[str], entries: Mapping[str, Entry]) -> list[str]:
    """The contenders that are installed; says of the others how to install them."""
    for name in names:
        if (missing := entries[name].missing) is not None:
            console(stderr=True).print(f"without {name}: {missing}")
    return [name for name in names if entries[name].missing is None]


def check_directory(place: Path) -> None:
    """Refuses to measure in a place that is no directory."""
    if not place.is_dir():
        raise click.UsageError(f"{place} is no directory")


def check_room(place: Path, needed_bytes: float, what: str, remedy: str) -> None:
    """Refuses what the file system has no room for.

    The remedy says what else to choose.
    """
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise click.UsageError(
            f"{place} has {free / 1e9:.2f} GB free and {what} {needed_bytes / 1e9:.2f}: choose "
            f"{remedy}, or another directory"
        )


@contextlib.contextmanager
def reported(
    results: Results,
    show: Callable[[Results], None],
    *,
    output: Path | None,
    report: Path | None,
    as_json: bool,
) -> Iterator[None]:
    """Writes and shows what was measured in the block, also where the block is broken off."""
    with endings.tidy():
        try:
            yield
        finally:
            # Hours may have gone into what there is.
            if results.measurements or sys.exc_info()[0] is None:
                write(results, output, report)
                if as_json:
                    print_json(results.as_json())
                else:
                    show(results)


@contextlib.contextmanager
def progress(
    total: float | None, *, is_quiet: bool, has_count: bool = True
) -> Iterator[Callable[..., None]]:
    """A bar on standard error, where that is a terminal.

    Args:
        total: The steps; None if they are not known.
        is_quiet: Whether there is none.
        has_count: Whether steps are counted, else time.

    Yields:
        A function that changes the bar: ``description``, ``advance`` or ``completed``.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    display = console(stderr=True)
    count = MofNCompleteColumn() if has_count else TimeElapsedColumn()
    columns = (BarColumn(), count, TextColumn("{task.description}"))
    hidden = is_quiet or not display.is_terminal
    with Progress(*columns, console=display, transient=True, disable=hidden) as bar:
        yield functools.partial(bar.update, bar.add_task("", total=total))


def print_remarks(results: Results, *, with_cases: bool = False) -> None:
    """Prints what failed, and the notes of measurements, each once."""

    def name(one: Measurement) -> str:
        return f"{one.case}, {one.by}" if with_cases else one.by

    lines = {f"{name(one)}: {one.error}" for one in results.measurements if one.error}
    lines |= {f"{one.by}: {note}" for one in results.measurements for note in one.notes}
    for line in sorted(lines):
        console().print(line)


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


def print_headlines(results: Results) -> None:
    """Prints them, with what is in brackets."""
    out, lines = console(), headlines(results)
    for line in lines:
        out.print(line, style="bold")
    if any("[" in line for line in lines):
        out.print(NOTE, style="dim")
    if lines:
        out.print()
