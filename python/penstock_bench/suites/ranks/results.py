"""What was measured with ranks, and the ratios that come of it, each within a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock_bench.suites.save_load.results import Spread, plain, spread, write

if TYPE_CHECKING:
    from pathlib import Path

PENSTOCK, ALONE = "penstock", "penstock-alone"
DCP = ("dcp-1", "dcp-4")
SAVE, LOAD, LOAD_ALONE = "save", "load", "load by one"


@dataclass(frozen=True)
class Entry:
    """Who saves and loads.

    Attributes:
        library: The name in `penstock_bench.suites.ranks.worker.Task`.
        threads: That write.
        is_alone: Whether one process has the whole state.
        note: Settings worth knowing.
    """

    library: str
    threads: int
    is_alone: bool
    note: str


# In the order of the first round.
ENTRIES = {
    PENSTOCK: Entry("penstock", 0, False, "penstock.save by every rank"),
    ALONE: Entry("penstock", 0, True, "one process has and saves everything"),
    "dcp-1": Entry("dcp", 1, False, "FileSystemWriter(sync_files=True), 1 thread a rank"),
    "dcp-4": Entry("dcp", 4, False, "the same, 4 threads a rank"),
}


@dataclass
class Sample:
    """One operation.

    Attributes:
        row: A name of `ENTRIES`.
        round_index: The round, from 0.
        operation: `SAVE`, `LOAD` or `LOAD_ALONE`: of what several ranks saved.
        state_bytes: Of all ranks together.
        seconds: From when all were ready until all were done, and saves synced.
        error: Why there is no measurement.
    """

    row: str
    round_index: int
    operation: str
    state_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None

    @property
    def gb_per_second(self) -> float:
        """The rate of all ranks together."""
        return self.state_bytes / self.seconds / 1e9


@dataclass
class Results:
    """A whole run."""

    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        """Who was measured."""
        return list(dict.fromkeys(sample.row for sample in self.samples))

    def spread(self, row: str, operation: str) -> Spread | None:
        """The rates of a cell of the table."""
        return spread(list(self._rates(operation, row).values()))

    def ratios(self) -> list[tuple[str, Spread | None]]:
        """The ratios that matter: how many times as fast."""
        return [
            ("save by all ranks / by one process", self._ratio(SAVE, PENSTOCK, ALONE)),
            ("save by all ranks / the best DCP", self._ratio(SAVE, PENSTOCK, *DCP)),
            ("load by all ranks / the best DCP", self._ratio(LOAD, PENSTOCK, *DCP)),
            ("load by one / the best DCP", self._ratio(LOAD_ALONE, PENSTOCK, *DCP)),
        ]

    def errors(self) -> list[str]:
        """Why measurements are missing, each reason once."""
        found = [f"{s.row}, {s.operation}: {s.error}" for s in self.samples if s.error]
        return list(dict.fromkeys(found))

    def write(self, path: Path) -> None:
        """Everything as JSON, with the statistics beside the samples they come from."""
        summary = {
            row: {
                operation: plain(self.spread(row, operation))
                for operation in (SAVE, LOAD, LOAD_ALONE)
            }
            for row in self.rows
        }
        ratios = {title: plain(found) for title, found in self.ratios()}
        write(path, self, gb_per_second=summary, ratios=ratios)

    def _rates(self, operation: str, *rows: str) -> dict[int, float]:
        """The best rate of some rows, by round."""
        best: dict[int, float] = {}
        for sample in self.samples:
            if sample.error is None and sample.operation == operation and sample.row in rows:
                known = best.get(sample.round_index, 0.0)
                best[sample.round_index] = max(known, sample.gb_per_second)
        return best

    def _ratio(self, operation: str, upper: str, *lower: str) -> Spread | None:
        above, below = self._rates(operation, upper), self._rates(operation, *lower)
        return spread([above[index] / below[index] for index in above if index in below])
