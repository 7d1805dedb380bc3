"""Formats the lines of a report for people: names and their texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

Row: TypeAlias = tuple[str, str]

_ROWS_MAX = 10
"""Largest number of rows of one kind, so that a report of a thousand problems stays readable."""


def aligned(*rows: Row) -> str:
    """Formats the rows that have a text, one line each, with the names in an aligned column.

    Control characters from a checkpoint are escaped, so they cannot control a terminal.
    """
    said = [(name, _printable(text)) for name, text in rows if text]
    width = max((len(name) for name, _ in said), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in said)


def _printable(text: str) -> str:
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def first_of(rows: Sequence[Row]) -> list[Row]:
    """Returns the first rows of one kind, and a row with the number of the others."""
    rest = len(rows) - _ROWS_MAX
    return [*rows[:_ROWS_MAX], *([("", f"and {rest:,} more")] if rest > 0 else [])]


def counted(count: int, what: str) -> str:
    """Formats a count with its noun: ``1 file``, ``2 files``."""
    return f"{count:,} {what}{'s'[: count != 1]}"


def in_bytes(nbytes: int) -> str:
    """Formats bytes in powers of ten: ``22.3 MB``."""
    if nbytes < 1000:
        return counted(nbytes, "byte")
    size, units = nbytes / 1000, ["kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:,.1f} {units[0]}"


def in_seconds(seconds: float) -> str:
    """Formats seconds, below one second as milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def gb_per_second(nbytes: int, seconds: float) -> float:
    """Returns a rate in GB/s (10**9 bytes); 0 if no time has passed."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0
