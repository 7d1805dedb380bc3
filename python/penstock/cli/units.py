"""Numbers with units on the command line: ``200MB``, ``7d``."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    _Type = click.ParamType[int]
else:
    # `ParamType` is generic for the type checker only: older releases of click lack it.
    _Type = click.ParamType

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)(?:/s)?")

_MAX = 2**63 - 1

BYTES = {
    "": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class _Quantity(_Type):
    """A number with an optional unit."""

    def __init__(self, name: str, units: Mapping[str, int]) -> None:
        self.name = name
        self._units = units

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _NUMBER.fullmatch(str(value).strip())
        if found is None or found[2] not in self._units:
            units = ", ".join(unit for unit in self._units if unit)
            self.fail(f"{value!r} is no number with one of the units {units}", param, ctx)
        number = float(found[1]) * self._units[found[2]]
        if number > _MAX:
            self.fail(f"{value!r} is too large", param, ctx)
        return round(number)


RATE = _Quantity("rate", BYTES)
BYTE_COUNT = _Quantity("size", BYTES)
AGE = _Quantity("age", SECONDS)


class Size(_Type):
    """A size as benchmarks write it: ``4096``, ``4K``, ``1M``, ``2G``; powers of two."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses a size, for click."""
        text = str(value).upper().removesuffix("IB").removesuffix("B")
        number, unit = (text[:-1], text[-1]) if text[-1:] in "KMGT" and text else (text, "")
        try:
            size = int(float(number) * _BINARY[unit])
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no size: write 4096, 4K, 1M or 2G", param, ctx)
        if not 1 <= size <= _MAX:
            self.fail(f"{value!r} is no size: from 1 byte to 8 EiB", param, ctx)
        return size


class Finite(click.FloatRange):
    """A finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses a finite number, for click."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number
