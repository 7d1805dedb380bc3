"""Failure logs: files of times, or tables with columns, for runs that replay them.

Without a header, each line is the second of a failure. A table has a header, and separators that
are commas, semicolons or tabs. Columns are found by name, in any order and case:

| column | names |
|---|---|
| time | ``time``, ``start``, ``timestamp``, ``Prob Started`` |
| duration | ``duration``, ``Down Time`` (minutes, as LANL writes it) |
| end | ``end``, ``Prob Fixed``: the duration is the time to it |
| node | ``node``, ``host``, ``nodenum`` |

Times are seconds, or dates in ISO 8601 or as ``month/day/year hour:minute``; durations are seconds
or have a unit. LANL's table of 1996 to 2005 can be read as it is (USENIX CFDR).
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from penstock.planning.models.failures import SECONDS_PER_DAY
from penstock.planning.models.units import seconds, show_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from penstock.planning.simulation.runs import Floats

_NAMES = {
    "time": ("time", "start", "timestamp", "prob started", "started"),
    "duration": ("duration", "duration_seconds", "down time"),
    "end": ("end", "prob fixed", "fixed"),
    "node": ("node", "host", "nodenum", "hostname"),
}

_MINUTES = "down time"
"""The column of durations in minutes."""

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?![\d,])[^,]*$")
"""A number with commas between its thousands, and its unit."""

_DATES = ("%m/%d/%Y %H:%M", "%m/%d/%y %H:%M", "%m/%d/%Y")

_SILENCE_FACTOR = 50
"""A time without failures this much longer than the mean is more likely a hole in the log: of
exponential gaps, one in 10^21 is.
"""

_LISTED_MAX = 3
"""Most lines that a message lists."""


@dataclass(frozen=True)
class Replay:
    """Failures of a log.

    Attributes:
        gaps: Seconds from each failure to the next.
        repairs: Seconds until the node of each failure but the first could be used again; None if
            the log does not say.
        notes: Sentences about the log, for the user.
    """

    gaps: Floats
    repairs: Floats | None
    notes: tuple[str, ...]


def read_replay(path: Path, where: Mapping[str, str] | None = None) -> Replay:
    """Reads a failure log.

    Args:
        path: The file.
        where: Values that columns of a table have to have, by the column's name: other rows are
            left out. ``{"System": "20"}`` takes one of LANL's systems.

    Raises:
        ValueError: The file cannot be read, a row of it has no valid time, or fewer than two
            failures are left; the message names the lines.
    """
    try:
        # Spreadsheets write a byte order mark.
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    first = next((line for line in lines if line.strip()), "")
    try:
        float(first)
    except ValueError:
        rows = _table(path, lines, where or {})
    else:
        if where:
            raise ValueError(f"{path} has one time a line and no columns to choose by")
        rows = _plain(path, lines)
    if len(rows) < 2:
        raise ValueError(f"{path}: {len(rows)} failures: expected at least two")
    return _replay(rows)


@dataclass(frozen=True)
class _Row:
    """One failure, in seconds."""

    line: int
    time: float
    duration: float | None = None
    node: str = ""


def _plain(path: Path, lines: list[str]) -> list[_Row]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(_Row(number, _time(line)))
            except ValueError:
                raise ValueError(
                    f"{path}, line {number}: {line.strip()!r}: expected the second of a failure"
                ) from None
    return rows


def _table(path: Path, lines: list[str], where: Mapping[str, str]) -> list[_Row]:
    header = next((index for index, line in enumerate(lines) if line.strip()), None)
    if header is None:
        raise ValueError(f"{path} is empty")
    table = _cells_of(path, lines, header)
    _, titles = next(table)
    names = [name.strip().lower() for name in titles]
    columns = {
        kind: next((names.index(name) for name in known if name in names), None)
        for kind, known in _NAMES.items()
    }
    if columns["time"] is None:
        raise ValueError(
            f"{path}: no column of times among {', '.join(titles)}: expected one of "
            f"{', '.join(_NAMES['time'])}, or the second of a failure in each line"
        )
    for name in where:
        if name.lower() not in names:
            raise ValueError(f"{path}: no column {name!r}: it has {', '.join(titles)}")
    wanted = [(names.index(name.lower()), value) for name, value in where.items()]
    in_minutes = columns["duration"] is not None and names[columns["duration"]] == _MINUTES
    rows, bad = [], []
    for number, cells in table:
        if not any(cells) or any(_cell(cells, at) != value for at, value in wanted):
            continue
        try:
            rows.append(_row(number, cells, columns, in_minutes=in_minutes))
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    if bad:
        more = f", and {len(bad) - _LISTED_MAX} more" if len(bad) > _LISTED_MAX else ""
        raise ValueError(f"{path}: {'; '.join(bad[:_LISTED_MAX])}{more}")
    return rows


def _cells_of(path: Path, lines: list[str], header: int) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row from the header on, and the number of its line."""
    separator = max(",;\t", key=lines[header].count)
    # An open quote would take the rows below it into its cell.
    reader = csv.reader(lines[header:], delimiter=separator, strict=True)
    line = header + 1
    try:
        for cells in reader:
            yield line, cells
            line = header + 1 + reader.line_num
    except csv.Error as error:
        raise ValueError(f"{path}, line {line}: {error}: expected quotes around a cell") from None


def _row(line: int, cells: list[str], columns: dict[str, int | None], *, in_minutes: bool) -> _Row:
    began = _time(_cell(cells, columns["time"]))
    length, end = _cell(cells, columns["duration"]), _cell(cells, columns["end"])
    duration = None
    if length:
        number = _plain_number(length)
        duration = 60 * float(number) if in_minutes else seconds(number, "duration")
    elif end:
        duration = _time(end) - began
    if duration is not None and not 0 <= duration < math.inf:
        raise ValueError(f"a duration of {duration:g} s: expected none below 0")
    return _Row(line, began, duration, _cell(cells, columns["node"]))


def _plain_number(text: str) -> str:
    """A number without the commas between its thousands; with decimal commas it is refused."""
    if "," not in text:
        return text
    if _THOUSANDS.match(text) is None:
        raise ValueError(f"duration: {text!r}: write a point before decimals, as in 1.5h")
    return text.replace(",", "")


def _cell(cells: list[str], column: int | None) -> str:
    return cells[column].strip() if column is not None and column < len(cells) else ""


def _time(text: str) -> float:
    """Seconds, of a number or a date; dates without a zone are in UTC."""
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        if not math.isfinite(number):
            raise ValueError(f"{text!r} is no time")
        return number
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        for form in _DATES:
            try:
                found = datetime.strptime(text, form).replace(tzinfo=UTC)
            except ValueError:
                continue
            break
        else:
            raise ValueError(f"{text!r} is no time: expected seconds or a date") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _replay(rows: list[_Row]) -> Replay:
    """Sorts the failures, and says what is odd about them."""
    notes = []
    late = [after.line for before, after in pairwise(rows) if after.time < before.time]
    if late:
        listed = ", ".join(map(str, late[:_LISTED_MAX])) + ", …" * (len(late) > _LISTED_MAX)
        notes.append(f"{len(late)} rows are not in order of time and were sorted: line {listed}")
    rows = sorted(rows, key=lambda row: row.time)
    gaps = [after.time - before.time for before, after in pairwise(rows)]
    if not sum(gaps) > 0:
        raise ValueError("all failures have the same time: expected two times that differ")
    mean = fmean(gaps)
    for gap, row in zip(gaps, rows, strict=False):
        if gap > _SILENCE_FACTOR * mean:
            notes.append(
                f"no failure for {show_seconds(gap)} after line {row.line}: the log may have a "
                "hole there; it is replayed as time without failures"
            )
    same = sum(gap == 0 for gap in gaps)
    if same:
        notes.append(f"{same} failures have the time of another one, and are replayed one by one")
    nodes = {row.node for row in rows if row.node}
    on = f" of {len(nodes)} nodes" if nodes else ""
    days = sum(gaps) / SECONDS_PER_DAY
    notes.insert(0, f"{len(rows)} failures{on} in {days:.3g} days, one each {show_seconds(mean)}")
    known = [row.duration for row in rows if row.duration is not None]
    repairs = None
    if known:
        middle = median(known)
        missing = len(rows) - len(known)
        if missing:
            notes.append(
                f"{missing} failures have no duration: the median, {show_seconds(middle)}, is taken"
            )
        repairs = np.array([middle if row.duration is None else row.duration for row in rows[1:]])
    return Replay(np.array(gaps), repairs, tuple(notes))
