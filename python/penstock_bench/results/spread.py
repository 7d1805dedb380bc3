"""Median and range of the rounds of a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Spread(NamedTuple):
    """Median and range of a figure, and over how many rounds."""

    median: float
    least: float
    most: float
    rounds: int

    def shown(self, form: str) -> str:
        """The median, with the range where the rounds differ."""
        return " ".join(filter(None, self.texts(lambda value: format(value, form))))

    def with_range(self, form: str) -> str:
        """The median with the range, also where all rounds are equal."""
        return f"{self.median:{form}} [{self.least:{form}}, {self.most:{form}}]"

    def texts(self, show: Callable[[float], str]) -> tuple[str, str]:
        """The median, and the range in brackets where the rounds differ."""
        middle, *ends = map(show, self[:3])
        return middle, "" if {middle} == {*ends} else f"[{', '.join(ends)}]"

    @property
    def inverse(self) -> Spread:
        """The spread of the reciprocals."""
        return Spread(1 / self.median, 1 / self.most, 1 / self.least, self.rounds)


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are known; None if there are none."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    return Spread(float(np.median(known)), min(known), max(known), len(known))


def known_spread(values: Iterable[float]) -> Spread:
    """The spread of values of which there is one at least."""
    found = spread(values)
    if found is None:
        raise ValueError("there are no values")
    return found


def plain(found: Spread | None) -> dict[str, float] | None:
    """A spread as a JSON object."""
    return found._asdict() if found else None
