"""Several jobs on one cluster: they share its file system, its spare nodes and its repairs.

Each run goes from event to event. Transfers are flows whose rates follow from max-min sharing, anew
whenever one begins or ends: SimPy has processes that hold a resource for a time known before, but
no resource whose users slow each other down, so a loop over the next event of every job is shorter
and needs no package.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.planning.models.failures import SECONDS_PER_DAY
from penstock.planning.simulation.model import flow_of
from penstock.planning.simulation.runs import Results, Times
from penstock.planning.simulation.sharing import max_min

if TYPE_CHECKING:
    from penstock.planning.simulation.model import ClusterModel, JobModel, Scenario
    from penstock.planning.simulation.sharing import Flow

EVENTS_MAX = 5_000_000
"""Most events of a run, before a scenario is refused."""


@dataclass(eq=False)
class _Transfer:
    """A save or a load that is under way.

    Attributes:
        flow: Its transfers.
        left: Bytes left of each.
        progress: Training that a save keeps; None for a load.
        rate: Bytes per second of each, until the next event.
    """

    flow: Flow
    left: float
    progress: float | None
    rate: float = 0.0

    def is_done(self, now: float) -> bool:
        """Whether all bytes are moved, but for what rounding leaves of them or of the time."""
        return self.left <= 1e-9 * self.flow.bytes_each or now + self.left / self.rate <= now


class _Pool:
    """Spare nodes, nodes in repair, and jobs that wait for one."""

    def __init__(self, cluster: ClusterModel) -> None:
        self._cluster = cluster
        # Without spares and repairs, there is always one.
        self._is_endless = not (cluster.spares or cluster.repair_seconds)
        self._spares = cluster.spares
        self._repaired: list[float] = []
        self._broken = 0
        self.waiting: deque[_Job] = deque()

    def fail(self, now: float) -> None:
        """Takes a failed node; it is repaired once a crew is free."""
        self._broken += 1
        self._begin_repairs(now)

    def _begin_repairs(self, now: float) -> None:
        crews = self._cluster.repair_crews or math.inf
        while self._broken and len(self._repaired) < crews:
            self._broken -= 1
            heapq.heappush(self._repaired, now + self._cluster.repair_seconds)

    @property
    def next_seconds(self) -> float:
        """When the next node is repaired."""
        return self._repaired[0] if self._repaired else math.inf

    def advance(self, now: float) -> None:
        """Takes repaired nodes back, and gives them to jobs that wait."""
        while self._repaired and self._repaired[0] <= now:
            heapq.heappop(self._repaired)
            self._spares += 1
            self._begin_repairs(now)
        while self.waiting and self.take():
            self.waiting.popleft().start(now, 1)

    def take(self) -> bool:
        """Takes a spare node, if there is one."""
        if self._is_endless:
            return True
        if not self._spares:
            return False
        self._spares -= 1
        return True


class _Job:
    """One job of a run: its phase, its nodes, and the accounts of its time."""

    def __init__(
        self, model: JobModel, times: Times, cluster: ClusterModel, random: np.random.Generator
    ) -> None:
        self.model, self.times = model, times
        self._cluster, self._random = cluster, random
        self._nodes = model.nodes or cluster.nodes
        self.have = self._nodes
        self.phase = "train"
        self.until = math.inf
        self.save_at = times.period - times.cost
        self.transfer: _Transfer | None = None
        self.progress = self._safe = 0.0
        self._saved_on = self._nodes
        self.failures = 0
        self.account = dict.fromkeys(("saving", "lost", "down", "restarting", "missing"), 0.0)
        self.fail_at = self._draw(0.0)

    def _draw(self, now: float) -> float:
        """When a node of the job fails next."""
        rate = self.have * self._cluster.failures_per_1000_node_days
        if not rate:
            return math.inf
        mean, shape = 1000 * SECONDS_PER_DAY / rate, self._cluster.weibull_shape
        return now + mean / math.gamma(1 + 1 / shape) * float(self._random.weibull(shape))

    @property
    def next_seconds(self) -> float:
        """When something happens to the job, but for the end of a transfer."""
        return min(self.until, self.fail_at, self.save_at if self.phase == "train" else math.inf)

    def pass_time(self, seconds: float) -> None:
        """Accounts for a time without events."""
        if self.transfer is not None:
            self.transfer.left -= self.transfer.rate * seconds
        if self.phase == "train":
            is_saving = self.transfer is not None
            present = self.have / self._nodes
            slowdown = self.model.slowdown if is_saving else 0.0
            self.progress += seconds * present * (1 - slowdown)
            self.account["saving"] += seconds * present * slowdown
            self.account["missing"] += seconds * (1 - present)
        else:
            self.account[_ACCOUNTS[self.phase]] += seconds

    def end_transfer(self, now: float) -> None:
        """Handles the end of a save or of a load."""
        ended, self.transfer = self.transfer, None
        if ended is None or ended.progress is None:
            self._train(now)
            return
        self._safe, self._saved_on = ended.progress, self.have
        # It may have stopped training: a synchronous save, or a next one that is due.
        if self.phase == "save":
            self._train(now)
        elif self.phase == "blocked":
            self._save(now)

    def _train(self, now: float) -> None:
        self.phase, self.until = "train", math.inf
        self.save_at = now + self.times.period - self.times.cost

    def _save(self, now: float) -> None:
        """Begins a save, unless one is in flight."""
        if self.transfer is not None:
            self.phase, self.save_at, self.until = "blocked", math.inf, math.inf
            return
        self.save_at = now + self.times.period
        flow = flow_of(self._cluster, self.model, self.have, reads=False, to=self.model.to)
        if flow is not None:
            self.transfer = _Transfer(flow, flow.bytes_each, self.progress)
        else:
            self._safe, self._saved_on = self.progress, self.have
        stall = self.model.stall_seconds
        if stall >= 0:
            self.phase, self.until = "stall", now + stall
        elif flow is not None:
            self.phase, self.until = "save", math.inf
        else:
            self._train(now)

    def happen(self, now: float, pool: _Pool) -> None:
        """Handles what happens at this time."""
        if self.fail_at <= now:
            self._fail(now, pool)
        elif self.phase == "train" and self.save_at <= now:
            self._save(now)
        elif self.until <= now:
            if self.phase == "down":
                self._find_node(now, pool)
            elif self.phase == "start":
                self._load(now)
            else:
                # The stall of a background save.
                self.phase, self.until = "train", math.inf

    def _fail(self, now: float, pool: _Pool) -> None:
        self.failures += 1
        self.have -= 1
        pool.fail(now)
        if self.model.to == "local" and self._random.random() < self._cluster.host_loss_share:
            self._safe = 0.0
        self.account["lost"] += self.progress - self._safe
        self.progress, self.transfer, self.fail_at = self._safe, None, math.inf
        self.phase, self.until = "down", now + self.model.detection_seconds

    def _find_node(self, now: float, pool: _Pool) -> None:
        """Restarts with as many nodes as there are, or waits for one."""
        taken = 0
        while self.have + taken < self._nodes and pool.take():
            taken += 1
        if self.have + taken >= (self.model.nodes_min or self._nodes):
            self.start(now, taken)
        else:
            self.have += taken
            self.until = math.inf
            pool.waiting.append(self)

    def start(self, now: float, taken: int) -> None:
        """Starts again, with some nodes more."""
        self.have += taken
        self.fail_at = self._draw(now)
        resharding = self.model.reshard_seconds if self.have != self._saved_on else 0.0
        self.phase, self.until = "start", now + self.model.start_seconds + resharding

    def _load(self, now: float) -> None:
        flow = flow_of(self._cluster, self.model, self.have, reads=True, to=self.model.to)
        if flow is None:
            self._train(now)
            return
        self.phase, self.until = "load", math.inf
        self.transfer = _Transfer(flow, flow.bytes_each, None)


_ACCOUNTS = {
    "save": "saving", "stall": "saving", "blocked": "saving", "down": "down",
    "start": "restarting", "load": "restarting",
}  # fmt: skip


def simulate_jobs(
    scenario: Scenario, *, days: float = 30.0, runs: int = 20, seed: int = 0
) -> dict[str, Results]:
    """Simulates the jobs of a cluster, event by event.

    Args:
        scenario: The cluster and its jobs.
        days: Length of each run.
        runs: Number of runs; one of a month takes about a second.
        seed: Seed of the random numbers; the same seed gives the same runs.

    Returns:
        The results of each job, by its name.

    Raises:
        ValueError: A number is out of range, or jobs use what only one job can.
    """
    if not (0 < days <= 3660 and 1 <= runs <= 100_000):
        raise ValueError(f"{days:g} days, {runs} runs: expected more than 0, at most ten years and "
                         "100,000 runs of jobs that share a cluster")  # fmt: skip
    models = scenario.jobs or (replace(scenario.job, name=scenario.job.name or scenario.name),)
    cluster = scenario.cluster
    times = []
    for model in models:
        if model.mirror or model.save_seconds:
            raise ValueError(f"{scenario.name}: {model.name}: mirror and save_seconds are for a "
                             "job on all nodes; give checkpoint_bytes and rates")  # fmt: skip
        alone = replace(cluster, nodes=model.nodes or cluster.nodes)
        times.append(Times.of(replace(scenario, job=model, jobs=(), cluster=alone)))
    # Each run and job has a generator of its own, so that policies see the same failures first.
    found = [
        _run(
            [
                _Job(model, one, cluster, np.random.default_rng((seed, number, index)))
                for index, (model, one) in enumerate(zip(models, times, strict=True))
            ],
            cluster,
            days * SECONDS_PER_DAY,
        )
        for number in range(runs)
    ]
    return {
        model.name: _results([run[index] for run in found], days * SECONDS_PER_DAY)
        for index, model in enumerate(models)
    }


def _run(jobs: list[_Job], cluster: ClusterModel, horizon: float) -> list[_Job]:
    """Runs jobs until a time, from one event to the next."""
    pool, now = _Pool(cluster), 0.0
    capacities = {"write": cluster.shared_write, "read": cluster.shared_read}
    moving: list[_Transfer] = []
    for _ in range(EVENTS_MAX):
        before, moving = moving, [job.transfer for job in jobs if job.transfer is not None]
        if moving != before:
            rates = max_min([one.flow for one in moving], capacities)
            for one, rate in zip(moving, rates, strict=True):
                one.rate = rate
        ends = [now + one.left / one.rate for one in moving]
        until = min([horizon, pool.next_seconds, *ends, *(job.next_seconds for job in jobs)])
        for job in jobs:
            job.pass_time(until - now)
        now = until
        if now >= horizon:
            return jobs
        pool.advance(now)
        for job in jobs:
            if job.transfer is not None and job.transfer.is_done(now):
                job.end_transfer(now)
            if job.next_seconds <= now:
                job.happen(now, pool)
    raise ValueError(f"more than {EVENTS_MAX:,} events in {horizon / SECONDS_PER_DAY:g} days: "
                     "give a longer interval_seconds, or fewer days")  # fmt: skip


def _results(jobs: list[_Job], horizon: float) -> Results:
    """Shares of time of a job in all runs."""

    def shares(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.array([job.account[name] / horizon for job in jobs])

    return Results(
        goodput=np.array([job.progress / horizon for job in jobs]),
        saving=shares("saving"),
        lost=shares("lost"),
        down=shares("down"),
        restarting=shares("restarting"),
        failures=np.array([job.failures for job in jobs], np.int64),
        period_seconds=jobs[0].times.period,
        missing=shares("missing"),
    )
