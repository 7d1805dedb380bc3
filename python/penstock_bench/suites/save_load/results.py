"""What was measured: one `Sample` per operation, their statistics, and the file they go to."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMAT_VERSION = 1


@dataclass
class Sample:
    """One operation of one contender in one round.

    Attributes:
        state: Name of the state.
        round_index: The round, from 0.
        row: The contender, with ``:`` and the variant of a load where there is one.
        operation: ``"save"`` or ``"load"``.
        state_bytes: Bytes of tensors moved: what rates are relative to.
        seconds: Wall time; of a save until everything is synced.
        sync_seconds: The part of it that the runner's sync of every file took.
        cpu_seconds: Of the process, its threads and children.
        machine_cpu_seconds: Busy time of all processors.
        extra_bytes: Peak of the resident set beyond the state itself.
        disk_bytes: Bytes allocated to the files.
        files: Number of files.
        resident_fraction: Share of the files in the page cache before a load.
        dropped: How the page cache was emptied.
        is_checked: Whether what was loaded was compared with what was saved, bit for bit.
        detail: What the library reports about itself.
        error: Why there is no measurement.
    """

    state: str
    round_index: int
    row: str
    operation: str
    state_bytes: int
    seconds: float = 0.0
    sync_seconds: float = 0.0
    cpu_seconds: float = 0.0
    machine_cpu_seconds: float = 0.0
    extra_bytes: int | None = None
    disk_bytes: int | None = None
    files: int | None = None
    resident_fraction: float | None = None
    dropped: str | None = None
    is_checked: bool = False
    detail: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def gb_per_second(self) -> float:
        """The rate."""
        return self.state_bytes / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        """Processor time of the process."""
        return self.cpu_seconds / self.state_bytes * 1e9

    @property
    def machine_cpu_seconds_per_gb(self) -> float:
        """Processor time of the machine."""
        return self.machine_cpu_seconds / self.state_bytes * 1e9


class Spread(NamedTuple):
    """Median and range of several measurements."""

    median: float
    least: float
    most: float
    rounds: int


def spread(values: list[float]) -> Spread | None:
    """The statistics of some values; None of none."""
    if not values:
        return None
    return Spread(float(np.median(values)), float(min(values)), float(max(values)), len(values))


def plain(found: Spread | None) -> dict[str, float] | None:
    """Statistics as JSON has them."""
    return found._asdict() if found else None


def write(path: Path, results: Any, **derived: Any) -> None:
    """Writes a run down.

    Args:
        path: The file.
        results: The dataclass with all that was measured.
        derived: What follows from it, so that nobody has to work it out.
    """
    document = {"format_version": FORMAT_VERSION, **dataclasses.asdict(results), **derived}
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")


@dataclass
class Results:
    """A whole run."""

    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    fio: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    bars: list[dict[str, Any]] = field(default_factory=list)

    def rows(self, state: str) -> list[str]:
        """The rows of a state, in the order they were first measured."""
        return list(dict.fromkeys(s.row for s in self.samples if s.state == state))

    def good(self, state: str, row: str, operation: str) -> list[Sample]:
        """The measurements of a cell."""
        return [
            sample
            for sample in self.samples
            if (sample.state, sample.row, sample.operation) == (state, row, operation)
            and sample.error is None
        ]

    def errors(self, state: str, row: str) -> list[str]:
        """Why measurements of a row are missing, each reason once."""
        samples = [s for s in self.samples if s.state == state and s.row == row and s.error]
        return list(dict.fromkeys(f"{s.operation}: {s.error}" for s in samples))

    def spread(
        self, state: str, row: str, operation: str, value: Callable[[Sample], float | None]
    ) -> Spread | None:
        """The statistics of a cell."""
        values = [value(sample) for sample in self.good(state, row, operation)]
        return spread([number for number in values if number is not None])

    def write(self, path: Path) -> None:
        """Everything as JSON, with the statistics beside the samples they come from."""
        summary = [
            {
                "state": state,
                "row": row,
                "operation": operation,
                "gb_per_second": self._spread_json(state, row, operation, "gb_per_second"),
                "seconds": self._spread_json(state, row, operation, "seconds"),
                "cpu_seconds_per_gb": self._spread_json(
                    state, row, operation, "cpu_seconds_per_gb"
                ),
                "machine_cpu_seconds_per_gb": self._spread_json(
                    state, row, operation, "machine_cpu_seconds_per_gb"
                ),
                "extra_bytes": self._spread_json(state, row, operation, "extra_bytes"),
                "errors": self.errors(state, row),
            }
            for state in self.states
            for row in self.rows(state)
            for operation in ("save", "load")
        ]
        write(path, self, summary=summary)

    def _spread_json(
        self, state: str, row: str, operation: str, name: str
    ) -> dict[str, float] | None:
        return plain(self.spread(state, row, operation, lambda sample: getattr(sample, name)))
