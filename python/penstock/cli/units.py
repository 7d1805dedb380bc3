"""Numbers with units on the command line: ``200MB``, ``7d``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from penstock.planning.models.units import byte_count, bytes_per_second, seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    _Type = click.ParamType[Any]
else:
    # `ParamType` is generic for the type checker only: older releases of click lack it.
    _Type = click.ParamType

_MAX = 2**63 - 1

_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Quantity(_Type):
    """A number with an optional unit, parsed by a function of `penstock.planning.models.units`."""

    def __init__(
        self, name: str, parse: Callable[[str | float, str], float], *, whole: bool = False
    ) -> None:
        self.name = name
        self._parse = parse
        self._whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses a number with its unit, for click."""
        try:
            number = self._parse(value, self.name)
        except ValueError as error:
            self.fail(str(error).removeprefix(f"{self.name}: "), param, ctx)
        if number > _MAX:
            self.fail(f"{value!r} is too large", param, ctx)
        return round(number) if self._whole else number


RATE = Quantity("rate", bytes_per_second, whole=True)
BYTE_COUNT = Quantity("size", byte_count, whole=True)
AGE = Quantity("age", seconds, whole=True)
DURATION = Quantity("time", seconds)
AMOUNT = Quantity("size", byte_count)


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
