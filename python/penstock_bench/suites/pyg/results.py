"""What was measured of epochs of a graph network, and the ratios that come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock_bench.suites.save_load.results import Spread, plain, spread, write

if TYPE_CHECKING:
    from pathlib import Path

PENSTOCK, SAMPLE, TRAIN, FIO = "penstock", "sample", "train", "fio"
MEMMAP, MEMMAP_MANY = "memmap", "memmap-many"
MANY = 8
"""Processes of `MEMMAP_MANY`."""
PEERS = (MEMMAP, MEMMAP_MANY)
ROWS = {
    PENSTOCK: "an epoch by GatherLoader: sampled, gathered ahead, trained",
    SAMPLE: "the same neighbourhoods, sampled and nothing else",
    TRAIN: "the same steps, of batches that are in memory",
    FIO: "the rows that penstock read, at the rate of fio's random reads of 4 KiB",
    MEMMAP: "its first batches by PyG's NodeLoader with our sampler, over numpy.memmap",
    MEMMAP_MANY: f"the same with {MANY} processes that sample and gather",
}


@dataclass
class Sample:
    """One process in one round.

    Attributes:
        row: A name of `ROWS`.
        round_index: The round, from 0.
        seconds: Of the epoch, or of its first batches.
        cpu_seconds: Of all threads and processes.
        detail: Seconds and loss after each batch, rows, hits, misses, requests, and what the
            control group had at most.
        error: Why there is no measurement.
    """

    row: str
    round_index: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def of_epoch(cls, row: str, round_index: int, found: dict[str, Any]) -> Sample:
        """What a process has found."""
        if "error" in found:
            return cls(row, round_index, error=found["error"])
        seconds, cpu_seconds = found.pop("seconds"), found.pop("cpu_seconds")
        return cls(row, round_index, seconds, cpu_seconds, found)


@dataclass
class Results:
    """A whole run.

    Attributes:
        fio: What was tried to find its best setting, reads a second by setting.
    """

    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    fio: dict[str, float] = field(default_factory=dict)

    def spread(self, row: str, what: str = "seconds") -> Spread | None:
        """Of all rounds."""
        return spread(list(self._values(row, what).values()))

    def ratio(self, peer: str) -> Spread | None:
        """How many times as long one takes as Penstock for the same batches, within a round."""
        ours = {one.round_index: one for one in self._good(PENSTOCK)}
        return spread(
            [
                one.seconds / ours[one.round_index].detail["at"][len(one.detail["at"]) - 1]
                for one in self._good(peer)
                if one.round_index in ours
            ]
        )

    def bounds(self) -> dict[int, tuple[str, float]]:
        """Of each round, what no epoch can be faster than: the longest of its parts, and which."""
        parts = {row: self._values(row, "seconds") for row in (SAMPLE, TRAIN, FIO)}
        rounds = set.intersection(*(set(one) for one in parts.values()))
        return {
            index: max(((row, one[index]) for row, one in parts.items()), key=lambda part: part[1])
            for index in sorted(rounds)
        }

    def bound_ratio(self) -> Spread | None:
        """An epoch, as a multiple of that."""
        epochs = self._values(PENSTOCK, "seconds")
        found = self.bounds().items()
        return spread([epochs[index] / bound for index, (_, bound) in found if index in epochs])

    def detail(self, row: str, name: str) -> Spread | None:
        """Of all rounds, what else was counted."""
        told = [one.detail.get(name) for one in self._good(row)]
        return spread([float(one) for one in told if one is not None])

    def differing(self) -> list[str]:
        """Who has other losses than Penstock, of the same batches."""
        ours = {one.round_index: one.detail["losses"] for one in self._good(PENSTOCK)}
        return [
            f"{one.row}: other losses in round {one.round_index + 1}"
            for peer in PEERS
            for one in self._good(peer)
            if ours.get(one.round_index, [])[: len(one.detail["losses"])] != one.detail["losses"]
        ]

    def errors(self) -> list[str]:
        """Why measurements are missing, each reason once."""
        found = [f"{one.row}: {one.error}" for one in self.samples if one.error]
        return list(dict.fromkeys(found))

    def write(self, path: Path) -> None:
        """Everything as JSON, with the statistics beside the samples they come from."""
        write(
            path,
            self,
            seconds={row: plain(self.spread(row)) for row in ROWS},
            bound_ratio=plain(self.bound_ratio()),
            peer_ratios={row: plain(self.ratio(row)) for row in PEERS},
        )

    def _good(self, row: str) -> list[Sample]:
        return [one for one in self.samples if one.error is None and one.row == row]

    def _values(self, row: str, what: str) -> dict[int, float]:
        return {one.round_index: getattr(one, what) for one in self._good(row)}
