"""Many runs of one scenario at once: each step of the loop is one failure of every run.

NumPy arrays hold one element per run, so 1,000 runs of 30 days on 100,000 GPUs take seconds. Time
between two failures needs no events: with a period P, the snapshots that are durable at its end
follow from its length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.planning.models.failures import SECONDS_PER_DAY
from penstock.planning.models.interval import best_period, save_cost

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.planning.simulation.model import Scenario

    Floats = NDArray[np.float64]
    Record = Callable[[str, float, float, dict[str, Any]], None]

RESTARTS_MAX = 10_000
"""Restarts in a row that may fail before a scenario is refused."""


@dataclass(frozen=True)
class Results:
    """Shares of time of each run; arrays of one number per run.

    Attributes:
        goodput: Training that counts at the end.
        saving: Time that saves took, those included that failures undid.
        lost: Training that failures undid.
        down: Detection, and waiting for spare nodes.
        restarting: Starts and loads, those that failed included.
        failures: Number of failures.
        period_seconds: Time from the start of one save to the start of the next.
        missing: Training that missing nodes would have done; 0 if a job always has all.
    """

    goodput: Floats
    saving: Floats
    lost: Floats
    down: Floats
    restarting: Floats
    failures: NDArray[np.int64]
    period_seconds: float
    missing: Floats | float = 0.0

    def summary(self) -> dict[str, float]:
        """Means over the runs, and the range that holds 90 % of their goodput."""
        low, high = np.quantile(self.goodput, (0.05, 0.95))
        return {
            "goodput": float(self.goodput.mean()),
            "goodput_low": float(low),
            "goodput_high": float(high),
            "saving": float(self.saving.mean()),
            "lost": float(self.lost.mean()),
            "down": float(self.down.mean()),
            "restarting": float(self.restarting.mean()),
            "missing": float(np.mean(self.missing)),
            "failures": float(self.failures.mean()),
            "interval_seconds": self.period_seconds,
        }


@dataclass(frozen=True)
class Times:
    """Durations that a scenario's bytes and rates come to, in seconds.

    Attributes:
        save: From the call of a save until it is durable.
        stall: Time for which it stops training.
        cost: Training time that it takes.
        mirror: Time of a copy to shared storage.
        restart: Start and load.
        period: From the start of one save to the start of the next.
        mtbf: Mean time between failures; inf without failures.
    """

    save: float
    stall: float
    cost: float
    mirror: float
    restart: float
    period: float
    mtbf: float

    @staticmethod
    def of(scenario: Scenario) -> Times:
        """Computes the durations of a scenario.

        Raises:
            ValueError: The interval is not longer than what a save takes from it.
        """
        job, save = scenario.job, scenario.write_seconds()
        stall = save if job.stall_seconds < 0 else job.stall_seconds
        cost, mtbf = save_cost(stall, save, job.slowdown), scenario.cluster.mtbf_seconds
        period = job.interval_seconds
        if not period:
            period = best_period(cost, mtbf) if math.isfinite(mtbf) else SECONDS_PER_DAY
            period = max(period, save, cost * 1.000001, 1e-3)
        if period <= cost or period < save:
            raise ValueError(
                f"{scenario.name}: interval_seconds = {period:g}: a save takes {save:g} s, "
                f"{cost:g} s of them from training, and one is in flight at a time"
            )
        return Times(
            save=save,
            stall=stall,
            cost=cost,
            mirror=scenario.mirror_seconds() if job.mirror else 0.0,
            restart=job.start_seconds + scenario.read_seconds(),
            period=period,
            mtbf=mtbf,
        )


def simulate(
    scenario: Scenario,
    *,
    days: float = 30.0,
    runs: int = 1000,
    seed: int = 0,
    gaps: Floats | None = None,
    repairs: Floats | None = None,
    record: Record | None = None,
) -> Results:
    """Simulates a scenario many times.

    Args:
        scenario: The cluster and its job.
        days: Length of each run.
        runs: Number of runs.
        seed: Seed of the random numbers; the same seed gives the same runs.
        gaps: Seconds between failures to replay, instead of drawn ones; each run begins at another
            one, and goes on from the first after the last.
        repairs: Seconds until the node that failed at the end of each gap can be used again,
            instead of the cluster's; None if it is not known.
        record: Called with each span of the first run: kind, start, end, further facts.

    Raises:
        ValueError: A number is out of range, or restarts fail without end.
    """
    if not (0 < days <= 3660 and 1 <= runs <= 10_000_000):
        raise ValueError(f"{days:g} days, {runs} runs: expected more than 0, at most ten years and "
                         "ten million runs")  # fmt: skip
    times = Times.of(scenario)
    state = _Runs(scenario, times, days * SECONDS_PER_DAY, runs, seed, gaps, repairs)
    while state.active.size:
        state.step(record)
    return state.results()


class _Runs:
    """The state of all runs between two failures."""

    def __init__(
        self,
        scenario: Scenario,
        times: Times,
        horizon: float,
        runs: int,
        seed: int,
        gaps: Floats | None,
        repairs: Floats | None,
    ) -> None:
        self._scenario, self._times, self._horizon = scenario, times, horizon
        self._random = np.random.default_rng(seed)
        self._gaps, self._repairs = gaps, None if gaps is None else repairs
        if gaps is not None:
            if not (np.isfinite(gaps).all() and (gaps >= 0).all() and gaps.sum() > 0):
                raise ValueError("gaps between failures: expected none negative, and not all zero")
            self._position = self._random.integers(0, gaps.size, runs)
        self.active = np.arange(runs)
        self._clock = np.zeros(runs)
        self._progress = np.zeros(runs)
        # Progress of the newest checkpoint in its own place and in the mirror.
        self._safe, self._mirrored = np.zeros(runs), np.zeros(runs)
        self._saving, self._lost = np.zeros(runs), np.zeros(runs)
        self._down, self._starting = np.zeros(runs), np.zeros(runs)
        self._failures = np.zeros(runs, np.int64)
        has_repairs = scenario.cluster.repair_seconds > 0 or self._repairs is not None
        self._has_spares = has_repairs and (scenario.cluster.spares > 0 or repairs is None)
        # When each spare can be used; a failed node becomes a spare when it is repaired.
        self._spares = np.zeros((runs, max(1, scenario.cluster.spares)))
        if self._has_spares and not scenario.cluster.spares:
            self._spares[:] = np.nan
        # The first start is not part of the runs.
        self._left = self._draw(self.active)

    def _draw(self, runs: NDArray[np.int64]) -> Floats:
        """Seconds until the next failure of some runs."""
        mtbf, shape = self._times.mtbf, self._scenario.cluster.weibull_shape
        if self._gaps is not None:
            found = self._gaps[self._position[runs] % self._gaps.size]
            self._position[runs] += 1
            return found
        if not math.isfinite(mtbf):
            return np.full(runs.size, math.inf)
        if shape == 1:
            return self._random.exponential(mtbf, runs.size)
        return mtbf / math.gamma(1 + 1 / shape) * self._random.weibull(shape, runs.size)

    def step(self, record: Record | None) -> None:
        """Moves all active runs past their next failure, or to their end."""
        times, active = self._times, self.active
        room = self._horizon - self._clock[active]
        up = np.minimum(self._left, room)
        whole = np.floor(up / times.period)
        part = up - whole * times.period
        trained = times.period - times.cost
        before = self._progress[active]
        now = before + whole * trained + np.minimum(part, trained)
        self._saving[active] += whole * times.cost + np.maximum(0.0, part - trained)
        self._keep(active, up, before, trained)
        if record is not None and active.size and active[0] == 0:
            self._record_up(record, float(self._clock[0]), float(up[0]))
        self._clock[active] += up
        fails = self._left < room
        self._progress[active] = now
        failed = active[fails]
        self._failures[failed] += 1
        self._roll_back(failed)
        self._restart(failed, record)
        self.active = failed[self._clock[failed] < self._horizon]
        kept = np.isin(failed, self.active, assume_unique=True)
        self._left = self._left_after[kept]

    def _keep(self, active: NDArray[np.int64], up: Floats, before: Floats, trained: float) -> None:
        """Finds the newest snapshots that are durable at the end of an uptime."""
        times = self._times
        lag = times.save - times.stall
        newest = np.floor((up - lag) / times.period)
        has = newest >= 1
        self._safe[active] = np.where(has, before + newest * trained, self._safe[active])
        if self._scenario.job.mirror:
            # The newest is copied next whenever a copy ends: each n-th, and the first one.
            n = max(1, math.ceil(times.mirror / times.period))
            copies = np.floor((up - lag - times.mirror - times.period) / (n * times.period))
            has = copies >= 0
            progress = before + (1 + copies * n) * trained
            self._mirrored[active] = np.where(has, progress, self._mirrored[active])

    def _roll_back(self, failed: NDArray[np.int64]) -> None:
        """Sets the progress of failed runs to that of the checkpoint that is left."""
        job, cluster = self._scenario.job, self._scenario.cluster
        if job.to == "local" and cluster.host_loss_share > 0:
            is_lost = self._random.random(failed.size) < cluster.host_loss_share
            self._safe[failed] = np.where(is_lost, self._mirrored[failed], self._safe[failed])
        self._lost[failed] += self._progress[failed] - self._safe[failed]
        self._progress[failed] = self._safe[failed]

    def _restart(self, failed: NDArray[np.int64], record: Record | None) -> None:
        """Moves failed runs to the end of their restart, which may fail itself."""
        times, job = self._times, self._scenario.job
        left = np.zeros(failed.size)
        waiting = np.arange(failed.size)
        for _ in range(RESTARTS_MAX):
            runs = failed[waiting]
            began = self._clock[runs]
            self._clock[runs] += job.detection_seconds
            self._take_spares(runs)
            self._down[runs] += self._clock[runs] - began
            drawn = self._draw(runs)
            spent = np.minimum(drawn, times.restart)
            if record is not None and runs.size and runs[0] == 0:
                ends = float(self._clock[0])
                record("down", float(began[0]), ends, {})
                record("restart", ends, ends + float(spent[0]), {})
            self._clock[runs] += spent
            self._starting[runs] += spent
            left[waiting] = drawn - times.restart
            # A run that is over needs no further restart.
            over = self._clock[runs] >= self._horizon
            fails = (drawn < times.restart) & ~over
            self._failures[runs[fails]] += 1
            self._roll_back(runs[fails])
            waiting = waiting[fails]
            if not waiting.size:
                self._left_after = np.maximum(left, 0.0)
                return
        raise ValueError(f"{self._scenario.name}: a restart takes {times.restart:g} s, and a "
                         f"failure comes each {times.mtbf:g} s: no restart ever ends")  # fmt: skip

    def _take_spares(self, runs: NDArray[np.int64]) -> None:
        """Waits for a spare node; the failed one becomes a spare when it is repaired."""
        if not self._has_spares:
            return
        repair: Floats | float = self._scenario.cluster.repair_seconds
        if self._repairs is not None:
            # The failure at the end of the newest gap has this repair.
            repair = self._repairs[(self._position[runs] - 1) % self._repairs.size]
        if not self._scenario.cluster.spares:
            self._clock[runs] += repair
            return
        first = np.argmin(self._spares[runs], axis=1)
        ready = self._spares[runs, first]
        self._spares[runs, first] = self._clock[runs] + repair
        self._clock[runs] = np.maximum(self._clock[runs], ready)

    def _record_up(self, record: Record, began: float, up: float) -> None:
        """Records the training and the saves of an uptime of the first run."""
        times = self._times
        record("train", began, began + up, {})
        for number in range(1, int(up // times.period) + 1):
            ends = began + number * times.period
            record("stall", ends - min(times.stall, times.period), ends, {"save": number})
            lag = times.save - times.stall
            if lag > 0 and ends + lag <= began + up:
                record("write", ends, ends + lag, {"save": number})

    def results(self) -> Results:
        """Shares of time; the end of a run cuts what was going on."""
        # A restart or wait that the end cuts has counted beyond it.
        beyond = np.maximum(0.0, self._clock - self._horizon)
        cut = np.minimum(beyond, self._starting)
        restarting, down = self._starting - cut, self._down - np.minimum(beyond - cut, self._down)
        total = self._progress + self._saving + self._lost + down + restarting
        return Results(
            goodput=self._progress / total,
            saving=self._saving / total,
            lost=self._lost / total,
            down=down / total,
            restarting=restarting / total,
            failures=self._failures,
            period_seconds=self._times.period,
        )
