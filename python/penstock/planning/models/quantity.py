"""`Quantity`: a number with its unit, its spread and its origin."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Origin = Literal["measured", "given", "assumed", "computed"]
"""Source of a number: measured by this run or on this machine, given by the caller, a documented
default, or computed from such numbers.
"""


@dataclass(frozen=True)
class Quantity:
    """A number that says where it came from.

    Attributes:
        value: The number itself.
        unit: Unit of all three numbers, as ``s`` or ``bytes``; empty for a ratio.
        origin: ``measured``, ``given``, ``assumed`` or ``computed``.
        source: The place of the number: a file, an option, a publication.
        low: Lower end of its spread.
        high: Upper end of its spread.

    Raises:
        ValueError: A number is not finite, is negative, or lies outside its spread.
    """

    value: float
    unit: str = ""
    origin: Origin = "given"
    source: str = ""
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not all(math.isfinite(one) and one >= 0 for one in (low, self.value, high)):
            raise ValueError(f"{self.source or 'a quantity'} is {self.value!r}: expected a finite "
                             "number that is not negative")  # fmt: skip
        if not low <= self.value <= high:
            raise ValueError(f"{self.source or 'a quantity'}: {self.value:g} {self.unit} is "
                             f"outside of its spread, {low:g} to {high:g}")  # fmt: skip

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper end of the spread; both the value itself if no spread is known."""
        return (
            self.value if self.low is None else self.low,
            self.value if self.high is None else self.high,
        )

    @property
    def is_guess(self) -> bool:
        """Whether the number is a documented default instead of a measured or given one."""
        return self.origin == "assumed"

    def scaled(self, factor: float, unit: str | None = None) -> Quantity:
        """The quantity multiplied by a factor, in another unit if one is named."""
        low, high = self.bounds
        return replace(
            self,
            value=self.value * factor,
            low=low * factor,
            high=high * factor,
            unit=self.unit if unit is None else unit,
        )

    def as_json(self) -> dict[str, float | str]:
        """The quantity as plain JSON."""
        low, high = self.bounds
        return {
            "value": self.value,
            "low": low,
            "high": high,
            "unit": self.unit,
            "origin": self.origin,
            "source": self.source,
        }


def given(value: float, unit: str, source: str) -> Quantity:
    """A number that the caller gave."""
    return Quantity(value, unit, "given", source)


def assumed(value: float, unit: str, source: str, low: float, high: float) -> Quantity:
    """A documented default with its spread."""
    return Quantity(value, unit, "assumed", source, low, high)


def measured(samples: list[float], unit: str, source: str) -> Quantity:
    """The median of some samples; the spread is their smallest and largest.

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError(f"{source}: no samples")
    ordered = sorted(samples)
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return Quantity(median, unit, "measured", source, ordered[0], ordered[-1])
