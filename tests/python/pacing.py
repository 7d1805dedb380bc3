"""A simulated training run that fails, paced by the real `Pace` or by a fixed number of steps."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from unittest import mock

import numpy as np

from penstock.checkpoint.steps import pace as module
from penstock.checkpoint.steps.pace import Pace
from penstock.planning import best_period, save_cost
from penstock.planning.records import history

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = 1_800_000_000.0
"""The begin of the runs, in seconds since 1970."""

RESTART_SECONDS = 120.0

RANKS = 2400
"""By published rates, a job of this size fails each 20 hours."""


@dataclass(frozen=True)
class Phase:
    """A part of a run: its failures and the cost of its saves, in seconds."""

    mtbf: float
    stall: float
    durable: float
    slowdown: float = 0.1
    failures: int = 40

    @property
    def seconds(self) -> float:
        return self.mtbf * self.failures

    @property
    def cost(self) -> float:
        return save_cost(self.stall, self.durable, self.slowdown)


class Rule(Protocol):
    """Decides when to save."""

    def start(self, now: float, step: int) -> None: ...

    def due(self, step: int, *, is_saving: bool) -> bool: ...

    def saved(self, now: float, stall: float, durable: float) -> None: ...


class Fixed:
    """Each so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps, self._last = steps, 0

    def start(self, now: float, step: int) -> None:
        self._last = step

    def due(self, step: int, *, is_saving: bool) -> bool:
        if step < self._last + self._steps:
            return False
        self._last = step
        return True

    def saved(self, now: float, stall: float, durable: float) -> None:
        pass


class Auto:
    """The pacing of a store, with a history as its processes write it."""

    def __init__(self, root: Path, **settings: float) -> None:
        self._root, self._settings = str(root), {"failures_per_hour": None, **settings}
        self._runs, self._step = itertools.count(), 0
        self.pace: Pace

    def start(self, now: float, step: int) -> None:
        self._run, self._began = str(next(self._runs)), now
        self.pace = Pace("auto", root=self._root, seconds_max=3600.0, **self._settings)
        if step:
            self.pace.restored(step)
        self._is_new, self._step = True, step

    def due(self, step: int, *, is_saving: bool) -> bool:
        self._step = step
        return self.pace.due(step, is_saving=is_saving)

    def saved(self, now: float, stall: float, durable: float) -> None:
        if self._is_new:
            # As `RunHistory`: a run begins with its first save.
            self._append({"time": self._began, "kind": "start"})
            self._is_new = False
        self.pace.entered(None)
        self.pace.saved(stall, durable)
        facts = {"step": self._step, "stall_seconds": stall, "seconds": durable}
        facts["step_seconds"] = self.pace.step_seconds
        if self.pace.step_seconds_during is not None:
            facts["step_seconds_during"] = self.pace.step_seconds_during
        self._append({"time": now, "kind": "save", **facts})

    def _append(self, entry: dict[str, object]) -> None:
        history.append(self._root, {"run": self._run, **entry})


class Job:
    """A training run of phases, with failures at the same times for each rule."""

    def __init__(self, phases: list[Phase], step_seconds: float, seed: int) -> None:
        self.phases, self.step_seconds = phases, step_seconds
        self.seconds = sum(phase.seconds for phase in phases)
        random, began, failures = np.random.default_rng(seed), 0.0, []
        for phase in phases:
            at = np.cumsum(random.exponential(phase.mtbf, 4 * phase.failures))
            failures += [began + float(one) for one in at if one < phase.seconds]
            began += phase.seconds
        self.failures = failures

    def phase(self, now: float) -> Phase:
        for phase in self.phases:
            if now < phase.seconds:
                return phase
            now -= phase.seconds
        return self.phases[-1]

    def lost(self, rule: Rule) -> float:
        """Seconds that saves took and failures undid; restarts are left out."""
        now = step = 0.0
        kept, restarts = 0, 0.0

        def monotonic() -> float:
            return now

        def wall() -> float:
            return BEGAN + now

        with (
            mock.patch.object(time, "perf_counter", monotonic),
            mock.patch.object(time, "time", wall),
            mock.patch.object(module, "own_size", return_value=RANKS),
        ):
            for failure in [*self.failures, self.seconds]:
                if now >= failure:
                    # It hits a restart, which begins anew.
                    restarts += max(0.0, failure + RESTART_SECONDS - now)
                    now = max(now, failure + RESTART_SECONDS)
                    continue
                step = kept
                rule.start(BEGAN + now, step)
                ends, snapshot = -1.0, kept
                while True:
                    is_saving = now < ends
                    pace = 1 - self.phase(now).slowdown if is_saving else 1.0
                    now += self.step_seconds / pace
                    if snapshot != kept and ends <= min(now, failure):
                        kept = snapshot
                    if now >= failure:
                        break
                    step += 1
                    if rule.due(step, is_saving=is_saving):
                        phase = self.phase(now)
                        if ends > now:
                            # One save is in flight at a time.
                            now = ends
                        if now + phase.stall >= failure:
                            break
                        ends, snapshot = now + phase.durable, step
                        now += phase.stall
                        rule.saved(BEGAN + now, phase.stall, phase.durable)
                if failure < self.seconds:
                    now = failure + RESTART_SECONDS
                    restarts += RESTART_SECONDS
        return self.seconds - restarts - step * self.step_seconds


def best_steps(phase: Phase, step_seconds: float, rate: float = 1.0) -> int:
    """The best number of steps, if failures come `rate` times as often as they do."""
    period = max(best_period(phase.cost, phase.mtbf / rate), phase.durable)
    return max(1, round((period - phase.cost) / step_seconds))
