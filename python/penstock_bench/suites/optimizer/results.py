"""What was measured of optimizers with their state on storage, and the ratios that come of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock_bench.suites.save_load.results import Spread, plain, spread, write

if TYPE_CHECKING:
    from pathlib import Path

PENSTOCK, ZERO, ZERO_OURS = "penstock", "deepspeed", "deepspeed-ours"
FIO_READ, FIO_WRITE, FIO_BOTH = "fio read", "fio write", "fio both"
SAVE, COPY = "save", "copy"
STEPPERS = (PENSTOCK, ZERO, ZERO_OURS)
ROWS = {
    PENSTOCK: "a step of AdamW with masters, durable when it returns",
    ZERO: "a step of ZeRO-Infinity's pipelined swapper, its own async_io; not synced",
    ZERO_OURS: "the same by Penstock's async_io",
    FIO_READ: "as many bytes read as the state has, io_uring, O_DIRECT",
    FIO_WRITE: "as many written over, and synced",
    FIO_BOTH: "both at the same time",
    SAVE: "penstock.save of the optimizer's state, which links its files",
    COPY: "a copy of those files, synced",
}


@dataclass
class Sample:
    """One process in one round.

    Attributes:
        row: A name of `ROWS`.
        round_index: The round, from 0.
        seconds: Of a step, the median of those of the process; of all bytes.
        cpu_seconds: Of a step, of all threads.
        error: Why there is no measurement.
    """

    row: str
    round_index: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    error: str | None = None

    @classmethod
    def of_steps(cls, row: str, round_index: int, found: dict[str, Any]) -> Sample:
        """What a process with some steps has found."""
        if "error" in found:
            return cls(row, round_index, error=found["error"])
        seconds = found["seconds"]
        cpu_seconds = found["cpu_seconds"] / len(seconds)
        return cls(row, round_index, statistics.median(seconds), cpu_seconds)


@dataclass
class Results:
    """A whole run.

    Attributes:
        save_bytes: What a save of the state has written.
    """

    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    save_bytes: int = 0

    def spread(self, row: str, what: str = "seconds") -> Spread | None:
        """Of all rounds."""
        return spread(list(self._values(row, what).values()))

    def ratio(self, upper: str, lower: str) -> Spread | None:
        """How many times as long one takes as the other, within a round."""
        above, below = self._values(upper, "seconds"), self._values(lower, "seconds")
        return spread([above[index] / below[index] for index in above if index in below])

    def bound_ratio(self) -> Spread | None:
        """A step, as a multiple of the longer of reading and writing its state."""
        steps = self._values(PENSTOCK, "seconds")
        reads, writes = self._values(FIO_READ, "seconds"), self._values(FIO_WRITE, "seconds")
        return spread(
            [
                steps[index] / max(reads[index], writes[index])
                for index in steps
                if index in reads and index in writes
            ]
        )

    def errors(self) -> list[str]:
        """Why measurements are missing, each reason once."""
        found = [f"{one.row}: {one.error}" for one in self.samples if one.error]
        return list(dict.fromkeys(found))

    def write(self, path: Path) -> None:
        """Everything as JSON, with the statistics beside the samples they come from."""
        write(path, self, seconds={row: plain(self.spread(row)) for row in ROWS})

    def _values(self, row: str, what: str) -> dict[int, float]:
        return {
            one.round_index: getattr(one, what)
            for one in self.samples
            if one.error is None and one.row == row
        }
