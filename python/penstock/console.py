"""What the commands share in talking to a person or a program.

Nothing in a name or a message is taken for markup, and nothing in it reaches the terminal as a
command: a checkpoint may come from anywhere. Long names fold instead of being cut, and there is no
colour where the output is no terminal.
"""

from __future__ import annotations

import json
import os
import unicodedata
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from penstock.errors import UnsupportedPathError
from penstock.paths import check_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from rich.text import Text

    from penstock.inspection import MissingInfo


class _PathType(click.Path):
    """A path that need not exist: what is missing is an error of the operation, not of its use."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            # As Path it would be the current directory: `penstock verify "$UNSET"`.
            self.fail("the path is empty", param, ctx)
        try:
            # Before it is a `Path`, which makes one slash of two.
            check_scheme(os.fsdecode(value))
        except UnsupportedPathError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


PATH = _PathType(path_type=Path)

TEXT_CHARACTERS_MAX = 200

FOLDED_COLUMNS_MIN = 12
"""What is left of a column that gives way; names of a letter a line are none."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON object."
)


def escaped(text: str) -> str:
    """The text, with the characters spelled out that would steer a terminal."""
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


class _Console(Console):
    """A console that escapes every text it is given, and cuts no table."""

    def print(self, *objects: Any, **options: Any) -> None:
        needed = max((one.columns_min for one in objects if isinstance(one, _Rows)), default=0)
        if needed > self.width:
            # A terminal that is too narrow breaks lines by itself, and drops nothing.
            console(stderr=self.stderr, width=needed).print(*objects, **options)
            return
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escaped(text), **options)


class _Rows(Table):
    """A table whose cells keep to their row, and none of whose columns goes.

    Where they have no room together, Rich takes from all, down to nothing: also from the numbers.
    """

    def add_row(self, *cells: Any, **options: Any) -> None:
        one_line = [c.replace("\n", "\\n") if isinstance(c, str) else c for c in cells]
        super().add_row(*one_line, **options)
        for column, cell in zip(self.columns, one_line, strict=False):
            needed = max(cell_len(str(column.header)), cell_len(escaped(str(cell or ""))))
            if not column.no_wrap:
                needed = min(needed, FOLDED_COLUMNS_MIN)
            column.min_width = max(column.min_width or 0, needed)

    @property
    def columns_min(self) -> int:
        """How wide a terminal it takes for every column to be there."""
        # Two between columns.
        return sum((column.min_width or 0) + 2 for column in self.columns)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Standard output, or standard error; as wide as the terminal, if nothing else is asked for."""
    return _Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def print_json(result: dict[str, Any]) -> None:
    """Prints one JSON object, and nothing else, to standard output."""
    click.echo(json.dumps(result, indent=2, allow_nan=False))


def table(*columns: str, numbers: Collection[str] = (), folded: Collection[str] = ()) -> Table:
    """A table of these columns.

    Args:
        columns: The headings.
        numbers: Headings of columns that align to the right.
        folded: Headings of columns that give way when the terminal is narrow; what is in the
            others stays in one line.
    """
    made = _Rows(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in numbers else "left",
            overflow="fold",
            no_wrap=column not in folded,
        )
    return made


def missing_table(missing: Iterable[MissingInfo]) -> Table:
    """What could not be salvaged; with whose it is where many ranks saved together."""
    missing = list(missing)
    is_many = any(entry.rank is not None for entry in missing)
    whose = ["of"] if is_many else []
    columns = ("missing", "dtype", "shape", *whose, "reason")
    rows = table(*columns, folded=["missing", "shape", "reason"])
    for entry in missing:
        of = ["all" if entry.rank is None else f"rank {entry.rank}"] if is_many else []
        rows.add_row(entry.name, entry.dtype, shape(entry.shape), *of, entry.reason)
    return rows


def size(nbytes: int) -> str:
    """Bytes for people, in powers of ten: ``22.3 MB``."""
    return decimal(nbytes)


def shape(dimensions: tuple[int, ...]) -> str:
    """A shape as ``2 x 3``; that of a single number is empty."""
    return " x ".join(map(str, dimensions))


def local_time(created: str) -> str:
    """A manifest's time stamp (RFC 3339, UTC) in the local time zone, to the second."""
    return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def shortened(text: str) -> str:
    """The text, or its beginning where it would fill the screen."""
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}..."


@contextmanager
def progress_bar(label: str, *, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error that is gone when done; none where that is no terminal.

    Args:
        label: What is being done.
        hidden: Whether to show nothing, as when the output is for a program.

    Yields:
        What ``progress=`` takes: a function of the bytes done and the bytes in all.
    """
    display = console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=display,
        transient=True,
        disable=hidden or not display.is_terminal,
    )
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
