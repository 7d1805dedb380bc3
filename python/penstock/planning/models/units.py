"""Numbers with units as people write them: ``90``, ``1.5h``, ``4.3 TiB``, ``2 GB/s``.

A number without a unit is in seconds, bytes or bytes per second. Units of another kind are refused
by name, so that GB is not taken for hours.
"""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)(/s)?")

SECONDS = {
    "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0,
    "d": 86_400.0, "w": 604_800.0, "y": 31_557_600.0,
}  # fmt: skip
"""Units of time, in seconds; a year has 365.25 days."""

BYTES = {
    "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "PiB": 2.0**50,
}  # fmt: skip
"""Units of size, in bytes."""


def seconds(text: str | float, name: str = "time") -> float:
    """Parses a time.

    Args:
        text: As ``90``, ``90s``, ``1.5h`` or ``30d``; a number is in seconds.
        name: Name of the argument in an error.

    Raises:
        ValueError: It is no time, or it is negative or infinite.
    """
    return _parse(text, name, SECONDS, "a time", rate=False)


def byte_count(text: str | float, name: str = "size") -> float:
    """Parses a size, as ``4.3TiB`` or ``105 GB``; a number is in bytes.

    Raises:
        ValueError: It is no size, or it is negative or infinite.
    """
    return _parse(text, name, BYTES, "a size", rate=False)


def bytes_per_second(text: str | float, name: str = "rate") -> float:
    """Parses a rate, as ``6 GB/s``; a number is in bytes per second.

    Raises:
        ValueError: It is no rate, or it is negative or infinite.
    """
    return _parse(text, name, BYTES, "a rate", rate=True)


def _parse(
    text: str | float, name: str, units: dict[str, float], kind: str, *, rate: bool
) -> float:
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise ValueError(f"{name}: {text!r} is not {kind}")
    if isinstance(text, str):
        found = _NUMBER.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{name}: {text!r} is not {kind}: write a number and one of the units "
                             f"{', '.join(units)}")  # fmt: skip
        number, unit = float(found[1]), found[2]
        if unit and unit not in units:
            raise ValueError(f"{name}: {text!r} is not {kind}{_other(unit, units)}: its units are "
                             f"{', '.join(units)}{' per second' if rate else ''}")  # fmt: skip
        if found[3] and not rate:
            raise ValueError(f"{name}: {text!r} is a rate, and {kind} is expected")
        number *= units[unit] if unit else 1.0
    else:
        number = float(text)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}: {text!r} is not {kind}: expected a finite number, 0 or more")
    return number


def _other(unit: str, units: dict[str, float]) -> str:
    """Names the kind of a unit of the other table, or the unit that only differs in case."""
    for kind, table in (("a time", SECONDS), ("a size", BYTES)):
        if table is not units and unit in table:
            return f", but {kind}"
    same = [one for one in units if one.lower() == unit.lower()]
    return f" ({unit!r} is written {same[0]!r})" if same else ""


def show_seconds(value: float) -> str:
    """A time as people read it: ``412 s``, ``1.8 h``, ``3.2 d``."""
    if not math.isfinite(value):
        return "never"
    for unit, size in (("y", SECONDS["y"]), ("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} s"


def show_bytes(value: float) -> str:
    """A size as people read it, in decimal units: ``1.64 TB``."""
    for unit in ("PB", "TB", "GB", "MB", "kB"):
        if value >= BYTES[unit]:
            return f"{value / BYTES[unit]:.3g} {unit}"
    return f"{value:.3g} B"
