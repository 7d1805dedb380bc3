"""What the commands of the benchmarks have in common: lists on the command line, and the output."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import RenderableType

# Wide enough for the tables wherever they go; a terminal that is narrower still wraps them.
_WIDTH = 180


def chosen(allowed: tuple[str, ...]) -> Callable[[object, object, str | None], tuple[str, ...]]:
    """Reads a comma-separated list of names."""

    def read(_context: object, _parameter: object, text: str | None) -> tuple[str, ...]:
        names = tuple(allowed if text is None else filter(None, text.split(",")))
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise click.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(allowed)}")
        return names

    return read


def output_directory(output: Path | None, root: Path) -> Path:
    """The directory for the results, made if it is not there."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    output = output or root / ".cache" / "bench" / "results" / stamp
    output.mkdir(parents=True, exist_ok=True)
    return output


def show(tables: RenderableType, output: Path, name: str) -> None:
    """Prints the tables, writes them down, and says where everything is."""
    with (output / f"{name}.txt").open("w") as file:
        Console(file=file, width=_WIDTH).print(tables)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(tables)
    names = ", ".join(sorted(path.name for path in output.glob(f"{name}.*")))
    console.print(f"\n{output}: {names}", highlight=False, soft_wrap=True)
