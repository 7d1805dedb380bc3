"""What the commands share in talking to a person or a program.

Nothing in a name or a message is taken for markup, and nothing in it reaches the terminal as a
command: a checkpoint may come from anywhere. Long names fold instead of being cut. Where the output
is no terminal there is no colour, and lines are as long as what is in them: nobody who reads a name
out of a file wants half of it. No colour says what no word says, and ``NO_COLOR`` leaves them out.
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
    """A path that need not exist: what is missing is an error of the operation, not of its use."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            # As Path it would be the current directory: `penstock verify "$UNSET"`.
            self.fail("the path is empty", param, ctx)
        try:
            # Before it is a `Path`, which makes one slash of two.
            value = local(os.fsdecode(value))
        except UnsupportedPathError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


PATH = _PathType(path_type=Path)


class _PlaceType(_PathType):
    """A path where a checkpoint or a store is, or the URL of one in a bucket; as text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            place = tidy(os.fsdecode(value))
        except UnsupportedPathError as error:
            self.fail(str(error), param, ctx)
        return place if of_bucket(place) else str(super().convert(value, param, ctx))


PLACE = _PlaceType(path_type=Path)

TEXT_CHARACTERS_MAX = 200

REASON_CHARACTERS_MAX = 24
"""What a table of steps has room for; longer reasons stand below it, where names stay whole."""

FOLDED_COLUMNS_MIN = 12
"""What is left of a column that gives way; names of a letter a line are none."""

_ENDS = "./_-,"
"""What a name that has no room is broken behind."""

_BETWEEN_COLUMNS = 3

_PLAIN_COLUMNS = 10_000
"""Of output that is no terminal, unless ``COLUMNS`` says otherwise."""

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
        tables = [one for one in objects if isinstance(one, _Rows)]
        needed = max((one.columns_min for one in tables), default=0)
        if needed > self.width:
            # A terminal that is too narrow breaks lines by itself, and drops nothing.
            console(stderr=self.stderr, width=needed).print(*objects, **options)
            return
        for one in tables:
            one.fit(self.width)
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

    def fit(self, columns_max: int) -> None:
        """Gives columns their widths where the terminal is too narrow for all that is in them.

        A word stays whole where there is room, so that sentences fold before names: first in the
        columns to the left, which are what a table is about.
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
            # What is left goes to who has least, column by column.
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
        """How wide a terminal it takes for every column to be there."""
        least = sum(column.min_width or 0 for column in self.columns)
        return least + _BETWEEN_COLUMNS * (len(self.columns) - 1)


def _broken(text: str, columns: int) -> str:
    """A text whose words of more columns are broken where their parts end, if they have any."""
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
    """How many columns the longest of some texts takes."""
    return max((cell_len(escaped(str(cell or ""))) for cell in cells), default=0)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Standard output, or standard error.

    As wide as is asked for, else as the terminal, or as ``COLUMNS`` says; else as the content.
    """
    made = _Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
    if width is None and not made.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        made.width = _PLAIN_COLUMNS
    return made


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


def summary_table(*rows: tuple[str, str]) -> Table:
    """What there is to know of one thing: names and values, one below the other."""
    made = table("what", "value", folded=["value"])
    made.show_header = False
    for what, value in rows:
        made.add_row(what, value)
    return made


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
