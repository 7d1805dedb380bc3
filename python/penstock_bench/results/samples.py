"""The measurements of a suite: one `Sample` for each operation, and their statistics by round."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from penstock_bench.results.spread import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMAT_VERSION = 1


@dataclass
class Sample:
    """One operation of one contender in one round.

    Attributes:
        row: The contender: a row of the table.
        round_index: The round, from 0.
        operation: The operation, where a suite has several.
        nbytes: Bytes that were moved; rates are relative to them.
        seconds: Wall time; of a save until everything is synced.
        cpu_seconds: Processor time of the process, its threads and children.
        error: Why there is no measurement.
        detail: Further figures of the operation.
    """

    row: str
    round_index: int
    operation: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    error: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def gb_per_second(self) -> float:
        """Bytes moved per wall time, GB/s."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        """Processor time for each GB moved."""
        return self.cpu_seconds / self.nbytes * 1e9

    def take(self, found: dict[str, Any]) -> None:
        """Takes over the figures of a child process; those without a field go to `detail`."""
        for name, value in found.items():
            if hasattr(self, name):
                setattr(self, name, value)
            else:
                self.detail[name] = value


S = TypeVar("S", bound=Sample)
Figure: TypeAlias = "str | Callable[[Any], float | None]"
"""The name of an attribute or of a detail of a sample, or a function of it."""


@dataclass
class Samples(Generic[S]):
    """All samples of a run, with the machine and the settings that they belong to.

    The extra ones are further fields of the JSON file.
    """

    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    samples: list[S] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, sample: S, found: dict[str, Any]) -> S:
        """Adds a sample with what a child process found; see `Sample.take`."""
        sample.take(found)
        self.samples.append(sample)
        return sample

    @property
    def rows(self) -> list[str]:
        """The contenders, in the order in which they were first measured."""
        return list(dict.fromkeys(one.row for one in self.samples))

    def good(self, row: str, **where: Any) -> list[S]:
        """The samples of a contender without those that failed."""
        return [
            one
            for one in self.samples
            if one.error is None
            and one.row == row
            and all(getattr(one, name) == value for name, value in where.items())
        ]

    def values(self, row: str, figure: Figure = "seconds", **where: Any) -> dict[int, float]:
        """A figure of a contender by round.

        Further arguments as for `good`.
        """
        found = {one.round_index: _figure(one, figure) for one in self.good(row, **where)}
        return {index: value for index, value in found.items() if value is not None}

    def spread(self, row: str, figure: Figure = "seconds", **where: Any) -> Spread | None:
        """The spread of a figure of a contender over all rounds; for arguments see `values`."""
        return spread(self.values(row, figure, **where).values())

    def ratio(
        self, upper: str, *lower: str, figure: Figure = "seconds", **where: Any
    ) -> Spread | None:
        """How many times the figure of another contender one has, within a round.

        The best rate of the round counts where there are several others.
        """
        below: dict[int, float] = {}
        for row in lower:
            for index, value in self.values(row, figure, **where).items():
                below[index] = max(value, below.get(index, value))
        return quotient(self.values(upper, figure, **where), below)

    def errors(self) -> list[str]:
        """Why samples are missing, each reason once."""
        found = [
            f"{', '.join(filter(None, (one.row, one.operation)))}: {one.error}"
            for one in self.samples
            if one.error
        ]
        return list(dict.fromkeys(found))

    def write(self, path: Path, **derived: Any) -> None:
        """Writes everything as JSON.

        Statistics stand beside the samples.
        """
        document = dataclasses.asdict(self)
        document |= document.pop("extra")
        write_json(path, {**document, **derived})


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes results with the version of their format."""
    document = {"format_version": FORMAT_VERSION, **document}
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")


def _figure(one: S, figure: Figure) -> float | None:
    if callable(figure):
        return figure(one)
    found: float | None = getattr(one, figure) if hasattr(one, figure) else one.detail.get(figure)
    return found


def quotient(above: dict[int, float], below: dict[int, float]) -> Spread | None:
    """The ratio of two figures by round, of the rounds that have both."""
    return spread(value / below[index] for index, value in above.items() if below.get(index))
