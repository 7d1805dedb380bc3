"""Options that the commands of the benchmarks share, and the output at their end."""

from __future__ import annotations

import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

# Wide enough for the tables wherever they go; a terminal that is narrower still wraps them.
WIDTH = 180


ROOT = Path(__file__).resolve().parents[3]
"""The repository."""

ROUNDS, QUICK_ROUNDS = 5, 2

_Command = TypeVar("_Command", bound="Callable[..., object]")


def common(function: _Command) -> _Command:
    """Adds the options that every benchmark has."""
    for option in (
        click.option(
            "--output",
            type=click.Path(path_type=Path),
            help="Where to put table, JSON and plot. [.cache/bench/results/<time>]",
        ),
        click.option(
            "--directory",
            type=click.Path(path_type=Path),
            default=ROOT / ".cache" / "bench",
            help="Where to write checkpoints: on the disk to measure. [.cache/bench]",
        ),
        click.option("--quick", is_flag=True, help="Small states, two rounds: does it work?"),
        click.option("--rounds", type=click.IntRange(min=1), help="Interleaved rounds. [5]"),
    ):
        function = option(function)
    return function


size_option = click.option("--size-gib", default=2.0, show_default=True, help="Of the Llama state.")
directory_option = click.option(
    "--directory", type=click.Path(path_type=Path), default=ROOT / ".cache" / "bench"
)


def names_option(
    option: str, parameter: str, allowed: tuple[str, ...], what: str, default: str = "all"
) -> Callable[[_Command], _Command]:
    """An option that takes some of these names, separated by commas; without it all are meant."""
    return click.option(
        option,
        parameter,
        callback=_chosen(allowed),
        metavar="LIST",
        help=f"{what}: {', '.join(allowed)}. Default: {default}.",
    )


def _chosen(allowed: tuple[str, ...]) -> Callable[[object, object, str | None], tuple[str, ...]]:
    def read(_context: object, _parameter: object, text: str | None) -> tuple[str, ...]:
        names = tuple(allowed if text is None else filter(None, text.split(",")))
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise click.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(allowed)}")
        return names

    return read


def output_directory(output: Path | None) -> Path:
    """The directory for the results, made if it is not there."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    output = output or ROOT / ".cache" / "bench" / "results" / stamp
    output.mkdir(parents=True, exist_ok=True)
    return output


def show(tables: RenderableType, output: Path, name: str) -> None:
    """Prints the tables, writes them down, and says where everything is."""
    with (output / f"{name}.txt").open("w") as file:
        Console(file=file, width=WIDTH).print(tables)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(tables)
    names = ", ".join(sorted(path.name for path in output.glob(f"{name}.*")))
    console.print(f"\n{output}: {names}", highlight=False, soft_wrap=True)


def free_port() -> int:
    """A port of this machine that no process listens at just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
