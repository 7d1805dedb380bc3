"""The lines that a report is for people: names, and what there is to say of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

Row: TypeAlias = tuple[str, str]

_ROWS_MAX = 10
"""Of one kind: a report of a thousand problems is still one that can be read."""


def aligned(*rows: Row) -> str:
    """A line of each row that says something, names in a column of their own.

    Nothing that stands in a checkpoint steers a terminal.
    """
    said = [(name, _printable(text)) for name, text in rows if text]
    width = max((len(name) for name, _ in said), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in said)


def _printable(text: str) -> str:
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def first_of(rows: Sequence[Row]) -> list[Row]:
    """The first rows of one kind, and how many there are beside them."""
    rest = len(rows) - _ROWS_MAX
    return [*rows[:_ROWS_MAX], *([("", f"and {rest:,} more")] if rest > 0 else [])]


def counted(count: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {what}{'s'[: count != 1]}"


def in_bytes(nbytes: int) -> str:
    """Bytes in powers of ten: ``22.3 MB``."""
    if nbytes < 1000:
        return counted(nbytes, "byte")
    size, units = nbytes / 1000, ["kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:,.1f} {units[0]}"


def in_seconds(seconds: float) -> str:
    """Seconds, or milliseconds where those are few."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
