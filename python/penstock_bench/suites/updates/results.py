"""What was measured of rows written anew, and the ratios that come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock_bench.suites.save_load.results import Spread, plain, spread, write

if TYPE_CHECKING:
    from pathlib import Path

TABLE, PWRITE, QUEUE, ROCKSDICT = "table", "pwrite", "queue", "rocksdict"
WRITERS = {
    TABLE: "penstock.features.Table: update and flush; without folding",
    PWRITE: "os.pwrite of each row in its place, in order, through the page cache, and fdatasync",
    QUEUE: "penstock.offload.TensorIO.write_all of the rows in their places, and fdatasync",
    ROCKSDICT: "RocksDB by rocksdict: a WriteBatch with its log, the last one of a flush synced",
}


@dataclass
class Sample:
    """One process in one round.

    Attributes:
        writer: A name of `WRITERS`.
        round_index: The round, from 0.
        rate: Rows a second.
        cpu_seconds: For a million rows, of all threads.
        fold_seconds: What a fold of all of them took after it, of `TABLE`.
        error: Why there is no measurement.
    """

    writer: str
    round_index: int
    rate: float = 0.0
    cpu_seconds: float = 0.0
    fold_seconds: float = 0.0
    error: str | None = None


@dataclass
class Results:
    """A whole run."""

    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)

    def _values(self, writer: str, what: str) -> dict[int, float]:
        return {
            one.round_index: getattr(one, what)
            for one in self.samples
            if one.writer == writer and one.error is None
        }

    def spread(self, writer: str, what: str = "rate") -> Spread | None:
        """Of all rounds."""
        return spread(list(self._values(writer, what).values()))

    def ratio(self, writer: str) -> Spread | None:
        """How many times as many rows a second the table writes, within a round."""
        ours, theirs = self._values(TABLE, "rate"), self._values(writer, "rate")
        return spread([ours[index] / theirs[index] for index in ours if index in theirs])

    def errors(self) -> list[str]:
        """Why measurements are missing, each reason once."""
        found = [f"{one.writer}: {one.error}" for one in self.samples if one.error]
        return list(dict.fromkeys(found))

    def write(self, path: Path) -> None:
        """Everything as JSON, with the statistics beside the samples they come from."""
        rates = {writer: plain(self.spread(writer)) for writer in WRITERS}
        ratios = {writer: plain(self.ratio(writer)) for writer in WRITERS if writer != TABLE}
        write(path, self, rates=rates, ratios=ratios)
