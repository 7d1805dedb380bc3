"""Which settings are tried next, and whether the best of them is better than the defaults.

Does no I/O: what measures is given to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock_bench.results.compare import MARGIN
from penstock_bench.results.spread import Spread, known_spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.options import Options

_RACE_ROUNDS = 3
"""How often the winner of a race was measured at least."""

_PASSES_MAX = 2
"""How often each setting is looked at: what is best for one depends on the others."""


class OutOfTime(Exception):  # noqa: N818
    """There is no time for one more measurement."""


class Trial(NamedTuple):
    """One save and one load.

    A save ends when the state is durable, a load when it is verified. The settings that ran are
    those that came of what was asked for; None where it failed, and took forever.
    """

    save_seconds: float
    load_seconds: float
    nbytes: int
    ran: tuple[Any, ...] | None


class Gain(NamedTuple):
    """How many times as fast as the defaults in the same round."""

    save: float
    load: float

    @property
    def mean(self) -> float:
        """The geometric mean: what counts is twice as fast or half as fast, not by how much."""
        return math.sqrt(self.save * self.load)


class Verdict(NamedTuple):
    """The best settings held against the defaults, in rounds of their own.

    Attributes:
        save: How many times as fast saves are.
        load: And loads.
        gain: Geometric mean of the two, round by round.
        is_better: Whether all of the gain's spread is above 1 and its median by more than what
            machines differ by from hour to hour, and neither saves nor loads lose as much.
    """

    save: Spread
    load: Spread
    gain: Spread
    is_better: bool


Rounds = dict["Options", Trial]


class Search:
    """Coordinate descent from the defaults; each coordinate is a race with successive halving.

    It measures each of some settings once, in turns, and raises `OutOfTime`.
    """

    def __init__(self, measure: Callable[[Sequence[Options]], Rounds], default: Options) -> None:
        self._measure = measure
        self._default = default
        self.best = default
        self.tried: set[Options] = set()

    def run(self, axes: Mapping[str, Sequence[Any]]) -> bool:
        """Looks for the best values.

        Returns whether there was time to look at everything.
        """
        try:
            for _ in range(_PASSES_MAX):
                before = self.best
                for name, values in axes.items():
                    self._race(_with(self.best, name, values))
                if self.best == before:
                    break
            for name in axes:
                self._doubt(name)
        except OutOfTime:
            return False
        return True

    def _race(self, field: Sequence[Options]) -> None:
        """Replaces the best settings so far by the best of some others, if that is better."""
        gains: dict[Options, list[Gain]] = defaultdict(list)
        alive = [one for one in field if one != self.best]
        number = 0
        while alive and (number < _RACE_ROUNDS or len(alive) > 1):
            trials = self._measure(list(dict.fromkeys([self._default, self.best, *alive])))
            self.tried.update(alive)
            usual = trials[self._default]
            seen = {usual.ran, trials[self.best].ran, None}
            gains[self.best].append(gain_of(trials[self.best], usual))
            kept = []
            for one in alive:
                # The same by another name, or refused: measuring it again tells nothing.
                if trials[one].ran not in seen:
                    seen.add(trials[one].ran)
                    gains[one].append(gain_of(trials[one], usual))
                    kept.append(one)
            kept.sort(key=lambda one: _score(gains[one]), reverse=True)
            alive = kept[: math.ceil(len(kept) / 2)]
            number += 1
        if alive and _score(gains[alive[0]]) > (1 + MARGIN) * _score(gains[self.best]):
            self.best = alive[0]

    def _doubt(self, name: str) -> None:
        """Takes one of several settings back to its default, unless the rest needs it."""
        usual = getattr(self._default, name)
        without = dataclasses.replace(self.best, **{name: usual})
        if without in (self.best, self._default):
            # A single changed setting is compared with the defaults in any case.
            return
        kept, dropped = [], []
        for _ in range(_RACE_ROUNDS):
            trials = self._measure([self._default, self.best, without])
            kept.append(gain_of(trials[self.best], trials[self._default]))
            dropped.append(gain_of(trials[without], trials[self._default]))
        if _score(kept) < (1 + MARGIN) * _score(dropped):
            self.best = without


def _with(options: Options, name: str, values: Sequence[Any]) -> list[Options]:
    """The options with each of the values that go with the rest of them."""
    made = []
    for value in values:
        # A small `staging_bytes` has no room for large extents.
        with contextlib.suppress(ValueError):
            made.append(dataclasses.replace(options, **{name: value}))
    return made


def gain_of(trial: Trial, usual: Trial) -> Gain:
    """How a trial compares with that of the defaults in the same round."""
    return Gain(usual.save_seconds / trial.save_seconds, usual.load_seconds / trial.load_seconds)


def _score(gains: Sequence[Gain]) -> float:
    middle = Gain(median(one.save for one in gains), median(one.load for one in gains))
    # Who gains with one of the two must not lose with the other.
    return middle.mean if min(middle) >= 1 - MARGIN else min(middle)


def decide(rounds: Sequence[tuple[Trial, Trial]]) -> Verdict:
    """Whether settings are better than the defaults."""
    gains = [gain_of(trial, usual) for usual, trial in rounds]
    save = known_spread([one.save for one in gains])
    load = known_spread([one.load for one in gains])
    gain = known_spread([one.mean for one in gains])
    is_ahead = gain.least > 1 and gain.median >= 1 + MARGIN
    return Verdict(save, load, gain, is_ahead and min(save.median, load.median) >= 1 - MARGIN)
