"""What was measured, and the figures that come of it: within a round, then over the rounds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock_bench.suites.save_load.results import Spread, plain, spread, write
from penstock_bench.suites.training.loop import Timing
from penstock_bench.suites.training.savers import ASYNC, DCP, LAZY, NOTHING, SYNC

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Round = dict[str, "Sample"]


@dataclass
class Sample:
    """One training run.

    Attributes:
        saver: How it saved.
        round_index: The round, from 0.
        state_bytes: Of the tensors of the state.
        copy_seconds: A plain copy of them in memory, in the same process.
        extra_bytes: Peak of memory beyond what training had before the first save.
        first: The first save, which finds memory cold, and the steps after it.
        timing: Those that count.
        steps: Steps among those.
        loss: Of the last step, to the last bit.
        error: Why there is no measurement.
    """

    saver: str
    round_index: int
    state_bytes: int = 0
    copy_seconds: float = 0.0
    extra_bytes: int = 0
    first: Timing = field(default_factory=Timing)
    timing: Timing = field(default_factory=Timing)
    steps: int = 0
    loss: str = ""
    error: str | None = None

    @classmethod
    def of(cls, saver: str, round_index: int, fields: dict[str, Any]) -> Sample:
        """From what a process returned."""
        fields = dict(fields)
        for name in ("first", "timing"):
            if name in fields:
                fields[name] = Timing(**fields[name])
        return cls(saver, round_index, **fields)

    @property
    def call_seconds(self) -> float:
        """What the call takes; the median of the run's saves."""
        return statistics.median(self.timing.call_seconds)

    @property
    def stall_seconds(self) -> float:
        """What the call takes, and what steps wait for it afterwards."""
        pairs = zip(self.timing.call_seconds, self.timing.wait_seconds, strict=True)
        return statistics.median(call + wait for call, wait in pairs)

    @property
    def first_stall_seconds(self) -> float:
        """The same of the first save."""
        return self.first.call_seconds[0] + self.first.wait_seconds[0]

    @property
    def durable_seconds(self) -> float:
        """From the call until the checkpoint is durable."""
        return statistics.median(self.timing.durable_seconds)

    def lost_seconds(self, nothing: Sample) -> float:
        """What training loses by one save: in calls, waits, and by what runs beside it."""
        saves = len(self.timing.call_seconds)
        return (self.timing.seconds - nothing.timing.seconds) / saves


def lost_seconds(sample: Sample, one: Round) -> float | None:
    """What a save costs, if the round has a run without saves."""
    return sample.lost_seconds(one[NOTHING]) if NOTHING in one else None


@dataclass
class Results:
    """A whole run."""

    machine: dict[str, Any]
    disk: dict[str, Any]
    settings: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)

    @property
    def rounds(self) -> list[Round]:
        """What was measured, by round."""
        rounds: dict[int, Round] = {}
        for sample in self.samples:
            if sample.error is None:
                rounds.setdefault(sample.round_index, {})[sample.saver] = sample
        return list(rounds.values())

    @property
    def savers(self) -> list[str]:
        """Who was to be measured."""
        return list(dict.fromkeys(sample.saver for sample in self.samples))

    def spread(self, saver: str, value: Callable[[Sample, Round], float | None]) -> Spread | None:
        """The statistics of a figure of a saver."""
        found = [value(one[saver], one) for one in self.rounds if saver in one]
        return spread([number for number in found if number is not None])

    def ratios(self) -> list[tuple[str, Spread | None]]:
        """The ratios that matter, each within a round, then over the rounds."""
        over = self._over
        stall, lost, durable = _stall, lost_seconds, _durable
        return [
            ("stall of async / a plain copy of the state", over(_of(ASYNC, stall), _copy)),
            ("stall of lazy / a synchronous save", over(_of(LAZY, stall), _of(SYNC, stall))),
            ("stall of the best DCP / of async", over(_best(stall), _of(ASYNC, stall))),
            ("stall of the best DCP / of lazy", over(_best(stall), _of(LAZY, stall))),
            ("lost with the best DCP / with async", over(_best(lost), _of(ASYNC, lost))),
            ("lost with the best DCP / with lazy", over(_best(lost), _of(LAZY, lost))),
            ("until durable, the best DCP / async", over(_best(durable), _of(ASYNC, durable))),
        ]

    def _over(
        self, upper: Callable[[Round], float | None], lower: Callable[[Round], float | None]
    ) -> Spread | None:
        pairs = [(upper(one), lower(one)) for one in self.rounds]
        # What was lost may come out as nothing, or less, in a round: no ratio says anything then.
        return spread(
            [above / below for above, below in pairs if above and below and min(above, below) > 0]
        )

    def errors(self, saver: str) -> list[str]:
        """Why measurements of a saver are missing, each reason once."""
        return list(dict.fromkeys(s.error for s in self.samples if s.saver == saver and s.error))

    def write(self, path: Path) -> None:
        """Everything as JSON, with the statistics beside the samples they come from."""
        figures: dict[str, Callable[[Sample, Round], float | None]] = {
            "call_seconds": lambda sample, _: sample.call_seconds,
            "stall_seconds": _stall,
            "first_stall_seconds": lambda sample, _: sample.first_stall_seconds,
            "lost_seconds": lost_seconds,
            "durable_seconds": _durable,
            "extra_bytes": lambda sample, _: float(sample.extra_bytes),
            "copy_seconds": lambda sample, _: sample.copy_seconds,
        }
        summary = {
            saver: {name: plain(self.spread(saver, value)) for name, value in figures.items()}
            for saver in self.savers
        }
        ratios = {title: plain(found) for title, found in self.ratios()}
        write(path, self, summary=summary, ratios=ratios)


def _stall(sample: Sample, _: Round) -> float:
    return sample.stall_seconds


def _durable(sample: Sample, _: Round) -> float:
    return sample.durable_seconds


def _of(
    saver: str, value: Callable[[Sample, Round], float | None]
) -> Callable[[Round], float | None]:
    return lambda one: value(one[saver], one) if saver in one else None


def _best(value: Callable[[Sample, Round], float | None]) -> Callable[[Round], float | None]:
    """The least that any setting of DCP has in a round."""

    def least(one: Round) -> float | None:
        found = [value(one[saver], one) for saver in DCP if saver in one]
        return min((number for number in found if number is not None), default=None)

    return least


def _copy(one: Round) -> float | None:
    return one[ASYNC].copy_seconds if ASYNC in one else None
