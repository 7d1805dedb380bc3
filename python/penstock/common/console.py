"""Console output of the commands, for people and for programs.

Names and messages are not parsed as markup and cannot send control sequences to the terminal,
because a checkpoint may come from anywhere. Long names fold instead of being cut. If the output is
not a terminal, there is no colour, and lines are as long as their contents, so that programs read
whole names. Colour never carries information alone, and ``NO_COLOR`` disables it.
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

from penstock.common.paths import local, of_bucket, tidy
from penstock.errors import UnsupportedPathError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from rich.text import Text


class _PathType(click.Path):
    """A path that need not exist: the operation itself reports a missing path, not the argument."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            # An empty path would become the current directory: `penstock verify "$UNSET"`.
            self.fail("the path is empty", param, ctx)
        try:
            # Checked before it becomes a `Path`, which merges two slashes.
            value = local(os.fsdecode(value))
        except UnsupportedPathError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


PATH = _PathType(path_type=Path)


class _LocationType(_PathType):
    """The path of a checkpoint or a store, or its URL in a bucket; as text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            place = tidy(os.fsdecode(value))
        except UnsupportedPathError as error:
            self.fail(str(error), param, ctx)
        return place if of_bucket(place) else str(super().convert(value, param, ctx))


PLACE = _LocationType(path_type=Path)

TEXT_CHARACTERS_MAX = 200

REASON_CHARACTERS_MAX = 24
"""Longest reason inside a table of steps; longer ones are printed below it, with whole names."""

FOLDED_COLUMNS_MIN = 12
"""Smallest width of a column that folds; narrower columns would have one letter per line."""

_ENDS = "./_-,"
"""Characters after which a name that is too long is broken."""

_BETWEEN_COLUMNS = 3

_PLAIN_COLUMNS = 10_000
"""Width of output that is not a terminal, unless ``COLUMNS`` is set."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON object."
)


def escaped(text: str) -> str:
    """Escapes the characters of a text that would control a terminal."""
    return "".join(
        character
        if character == "\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


class _Console(Console):
    """A console that escapes every text and cuts no table."""

    def print(self, *objects: Any, **options: Any) -> None:
        tables = [one for one in objects if isinstance(one, _Rows)]
        needed = max((one.columns_min for one in tables), default=0)
        if needed > self.width:
            # A terminal that is too narrow wraps lines by itself and drops nothing.
            console(stderr=self.stderr, width=needed).print(*objects, **options)
            return
        for one in tables:
            one.fit(self.width)
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escaped(text), **options)


class _Rows(Table):
    """A table in which each cell stays in its row and no column disappears.

    Without minimum widths, Rich shrinks all columns down to nothing, also those with numbers.
    """

    def add_row(self, *cells: Any, **options: Any) -> None:
        one_line = [c.replace("\n", "\\n") if isinstance(c, str) else c for c in cells]
        super().add_row(*one_line, **options)
        for column, cell in zip(self.columns, one_line, strict=False):
            needed = max(cell_len(str(column.header)), cell_len(escaped(str(cell or ""))))
            if not column.no_wrap:
                needed = min(needed, FOLDED_COLUMNS_MIN)
            column.min_width = max(column.min_width or 0, needed)

    def fit(self, columns_max: int) -> None:
        """Sets the column widths for a terminal that is too narrow for the whole contents.

        Words stay whole if possible, so that sentences fold before names do. The columns to the
        left, which identify the rows, come first.
        """
        wanted = [_longest([str(column.header), *column.cells]) for column in self.columns]
        if sum(wanted) + _BETWEEN_COLUMNS * (len(wanted) - 1) <= columns_max:
            return
        widths = [column.min_width or 0 for column in self.columns]
        room = columns_max - self.columns_min
        for index, column in enumerate(self.columns):
            words = [word for cell in column.cells for word in str(cell or "").split()]
            more = _longest(words) - widths[index]
            if 0 < more <= room:
                widths[index] += more
                room -= more
        while room > 0:
            # The narrowest columns get the remaining room, one character at a time.
            index = min(
                (at for at in range(len(widths)) if widths[at] < wanted[at]),
                key=widths.__getitem__,
            )
            widths[index] += 1
            room -= 1
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
            column._cells = [_broken(escaped(str(cell or "")), width) for cell in column.cells]

    @property
    def columns_min(self) -> int:
        """The smallest terminal width that shows every column."""
        least = sum(column.min_width or 0 for column in self.columns)
        return least + _BETWEEN_COLUMNS * (len(self.columns) - 1)


def _broken(text: str, columns: int) -> str:
    """Breaks words that exceed a width, preferably after one of `_ENDS`."""
    words = []
    for word in text.split(" "):
        pieces = []
        while len(word) > columns:
            at = 1 + max(word.rfind(end, 0, columns) for end in _ENDS)
            at = at if 2 * at > columns else columns
            pieces.append(word[:at])
            word = word[at:]
        words.append("\n".join([*pieces, word]))
    return " ".join(words)


def _longest(cells: Iterable[Any]) -> int:
    """Returns the width of the widest of some texts."""
    return max((cell_len(escaped(str(cell or ""))) for cell in cells), default=0)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Returns a console for standard output or standard error.

    Its width is the given one, else that of the terminal or of ``COLUMNS``, else that of the
    contents.
    """
    made = _Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
    if width is None and not made.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        made.width = _PLAIN_COLUMNS
    return made


def print_json(result: dict[str, Any]) -> None:
    """Prints one JSON object to standard output."""
    click.echo(json.dumps(result, indent=2, allow_nan=False))


def table(*columns: str, numbers: Collection[str] = (), folded: Collection[str] = ()) -> Table:
    """Creates a table.

    Args:
        columns: The headings.
        numbers: Headings of right-aligned columns.
        folded: Headings of columns that fold in a narrow terminal; other columns stay on one line.
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


def summary_table(*rows: tuple[str, str]) -> Table:
    """Creates a table of names and values, one row each."""
    made = table("what", "value", folded=["value"])
    made.show_header = False
    for what, value in rows:
        made.add_row(what, value)
    return made


def size(nbytes: int) -> str:
    """Formats bytes for people, in powers of ten: ``22.3 MB``."""
    return decimal(nbytes)


def shape(dimensions: tuple[int, ...]) -> str:
    """Formats a shape as ``2 x 3``; that of a single number is empty."""
    return " x ".join(map(str, dimensions))


def local_time(created: str) -> str:
    """Formats a manifest's time stamp (RFC 3339, UTC) in local time, to the second."""
    return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def shortened(text: str) -> str:
    """Returns the text, or its beginning if it is too long for the screen."""
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}..."


@contextmanager
def progress_bar(label: str, *, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows a temporary bar on standard error, if that is a terminal.

    Args:
        label: The name of the operation.
        hidden: Whether to show nothing, as when a program reads the output.

    Yields:
        The function for ``progress=``, called with the bytes done and the total bytes.
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
