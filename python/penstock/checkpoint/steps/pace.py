"""`Pace`: decides at which steps a store saves.

All ranks call `due` with the same steps and get the same answers, without a message of its own.
The committing rank measures, and its number of steps goes to the other ranks with the begin of a
save, and once when all have loaded a step. It is used after a save that succeeded, from a later
step on, at which every rank knows that it did: answers depend on nothing that one rank alone has
seen, such as a call that failed there.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.common.events import SaveInterval, notify
from penstock.common.process import own_size
from penstock.errors import RankError
from penstock.planning.models.failures import NODE_RATE, RANKS_PER_NODE, mtbf, rate_quantiles
from penstock.planning.models.interval import best_period, save_cost
from penstock.planning.records.history import Summary, summarize

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.ranks.round import Round

    Agree = Callable[[Callable[[], int | None]], int | None]

FIRST_STEPS = 20
"""Steps before a save while no number of steps is known: before the first two, and among several
ranks before the first three or four.
"""

_SAVES_REMEMBERED = 5
_STEPS_REMEMBERED = 64

_POLL_SECONDS = 0.01

_TIMEOUTS_MAX = 3
"""Longest wait for a save to end, in timeouts of its ranks: it waits up to two for its outcome."""

_FAILURES_KNOWN = 4
"""Failures of the history from which on they say more of a run than what others published."""

_HYSTERESIS = 0.2
"""A number of steps that differs by less than this share from the last one is not announced."""


class _Best(NamedTuple):
    """A number of steps, and why.

    Attributes:
        steps: The number of steps.
        why: What decided.
        is_bound: Whether the longest time allowed is less than the best period.
        cost_seconds: Training time that a save costs.
        failure_seconds: Mean time between failures.
        reason: The inputs, in words.
    """

    steps: int
    why: Literal["best", "bound", "durable"]
    is_bound: bool
    cost_seconds: float
    failure_seconds: float
    reason: str


class Pace:
    """Decides at which steps a store saves.

    Args:
        every: A number of steps, or ``"auto"``: from the measured cost of saves and the failure
            rate, as `penstock.planning.best_period`.
        failures_per_hour: Failures of the whole job; None for the newest of the store's history,
            and for published rates before it has any.
        seconds_max: Longest time between two saves.
        root: The store's directory.
        agree: Gives all ranks the first rank's result of a function; None if the number of steps
            travels with the saves.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        every: int | Literal["auto"],
        *,
        failures_per_hour: float | None,
        seconds_max: float,
        root: str,
        agree: Agree | None = None,
    ) -> None:
        is_count = isinstance(every, int) and not isinstance(every, bool)
        if not (every == "auto" or (is_count and every >= 1)):
            raise ValueError(f"save_every={every!r}: expected a number of steps from 1, or 'auto'")
        if failures_per_hour is not None and not 0 < failures_per_hour < math.inf:
            raise ValueError(f"failures_per_hour={failures_per_hour!r}: expected more than 0")
        if not 0 < seconds_max < math.inf:
            raise ValueError(f"save_seconds_max={seconds_max!r}: expected more than 0")
        self._auto = every == "auto"
        self._steps = FIRST_STEPS if every == "auto" else every
        self._failures_per_hour = failures_per_hour
        self._seconds_max = seconds_max
        self._root = root
        self._agree = agree
        self._last: int | None = None
        self._began_seconds = time.perf_counter()
        self._history: Summary | None = None
        # Measured by the committing rank.
        self._stalls: deque[float] = deque(maxlen=_SAVES_REMEMBERED)
        self._durables: deque[float] = deque(maxlen=_SAVES_REMEMBERED)
        self._alone: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._beside: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._looked: tuple[int, float] | None = None
        self._measured: int | None = None
        # Rounds of the last saves, by the number of times that `due` had answered True.
        self._answers = 0
        self._rounds: dict[int, Round] = {}
        self._has_rounds = False
        self._process = os.getpid()
        self._found = SaveInterval(self._steps, "first" if self._auto else "given")
        self._reported = self._found
        self.reason = ""

    def due(self, step: int, *, is_saving: bool) -> bool:
        """Whether a save is due after a step.

        Args:
            step: The training step.
            is_saving: Whether a background save is running.

        Raises:
            RankError: The save of the second last answer neither ends nor fails.
        """
        now = time.perf_counter()
        if self._looked is not None and step > self._looked[0]:
            seconds = (now - self._looked[1]) / (step - self._looked[0])
            (self._beside if is_saving else self._alone).append(seconds)
        self._looked = (step, now)
        if self._last is None or step < self._last:
            # The first step, or one after a return to an older checkpoint.
            self._last = step - 1
        if step < self._last + self._steps:
            return False
        self._last = step
        self._answers += 1
        if self._auto:
            self._adopt()
            self._report()
        return True

    def restored(
        self, step: int | None, ranks: Ranks | None = None, timeout_seconds: float = 0.0
    ) -> None:
        """Counts steps from one that was loaded, and goes on as the runs before.

        Args:
            step: The step; None if there was none.
            ranks: The ranks that loaded it, all of which call this; None for this process alone,
                and for ranks that agree by themselves.
            timeout_seconds: Longest wait for them.
        """
        if step is not None:
            self._last = step
        if not self._auto:
            return
        if self._agree is not None:
            steps = self._agree(self._remembered)
        elif ranks is None:
            steps = self._remembered()
        else:
            steps = ranks.agree(
                "number of steps between saves",
                timeout_seconds,
                lambda: {"steps": self._remembered()},
            )["steps"]
        if steps is not None:
            self._steps = self._measured = steps

    def _remembered(self) -> int | None:
        """The number of steps that fits the runs before; None without paced saves of theirs."""
        try:
            # This run has no line yet.
            found = self._past(time.time())
            if not (found.stall and found.durable and found.step and found.step.value):
                return None
            slowdown = 0.0 if found.slowdown is None else found.slowdown.value
            best = self._best(found.stall.value, found.durable.value, slowdown, found.step.value)
        except Exception:
            # Anybody may write into the history, and no resume may fail for its statistics. With
            # several ranks, the others would wait for the number.
            return None
        return best.steps

    def entered(self, save_round: Round | None) -> None:
        """Handles a save that begins."""
        # The step that the save interrupts would count its stall.
        self._looked = None
        if self._auto and self._agree is None and save_round is not None:
            save_round.proposal = self._measured
            self._rounds[self._answers] = save_round
            self._has_rounds = True
            self._process = os.getpid()

    def _adopt(self) -> None:
        """Takes the number of steps that every rank has.

        The save of the answer before may still run. The one before that has ended, as the next save
        waited for it; if none was made, this waits.
        """
        if self._agree is not None:
            # All ranks are at this step.
            self._steps = self._agree(lambda: self._measured) or self._steps
            return
        if not self._has_rounds:
            self._steps = self._measured or self._steps
            return
        ended = self._rounds.get(self._answers - 2)
        if ended is not None:
            self._wait_for(ended)
            self._steps = ended.announcement or self._steps
        self._rounds = {key: one for key, one in self._rounds.items() if key >= self._answers - 2}

    def _wait_for(self, one: Round) -> None:
        """Waits until this rank has left a round, or can no longer get its number."""
        began = time.monotonic()
        # In a fork no thread ends the round; a fork does not save with the ranks.
        while not (one.has_left or one.has_failed or self._process != os.getpid()):
            if time.monotonic() - began > _TIMEOUTS_MAX * one.timeout_seconds:
                # Going on would give this rank another answer than those that have its number.
                raise RankError(
                    f"{one.label}: the save has not ended on rank {one.rank} within "
                    f"{_TIMEOUTS_MAX} times the timeout of {one.timeout_seconds:g} s; its storage "
                    "may hang; save less often, or give Options a longer rank_timeout_seconds",
                    rank=one.rank,
                )
            time.sleep(_POLL_SECONDS)

    def saved(self, stall_seconds: float, durable_seconds: float) -> None:
        """Takes the times of a save, on the committing rank, and finds the next number of steps."""
        self._stalls.append(stall_seconds)
        self._durables.append(max(stall_seconds, durable_seconds))
        if self._auto and (self._alone or self._beside):
            self._measure()
        self._report()

    def _measure(self) -> None:
        """Finds the number of steps that loses least time."""
        best = self._best(
            statistics.median(self._stalls),
            statistics.median(self._durables),
            self.slowdown or 0.0,
            self.step_seconds or statistics.median(self._beside),
        )
        measured = self._measured
        if measured is None or best.is_bound or abs(best.steps / measured - 1) >= _HYSTERESIS:
            self._measured = best.steps
        self._found = SaveInterval(
            self._measured or best.steps,
            best.why,
            cost_seconds=best.cost_seconds,
            failure_seconds=best.failure_seconds,
        )
        self.reason = f"the next saves are {self._measured} steps apart: {best.reason}"

    def _best(self, stall: float, durable: float, slowdown: float, step: float) -> _Best:
        """The best number of steps for durations in seconds."""
        cost = save_cost(stall, durable, slowdown)
        mtbf_seconds = self._mtbf_seconds()
        period = max(best_period(cost, mtbf_seconds), durable)
        is_bound = period > self._seconds_max
        best = round((min(period, self._seconds_max) - cost) / step)
        # One save is in flight at a time.
        least = math.ceil(durable / step)
        bound = ", the longest time allowed" if is_bound else ""
        why: Literal["best", "bound"] = "bound" if is_bound else "best"
        return _Best(
            max(1, least, best),
            "durable" if least > best else why,
            is_bound,
            cost,
            mtbf_seconds,
            f"a save takes {cost:.3g} s of training and {durable:.3g} s in all, a step {step:.3g} "
            f"s, and a failure comes each {mtbf_seconds / 3600:.3g} h{bound}",
        )

    def _report(self) -> None:
        """Reports the number of steps that is used now, on the rank that measures."""
        if not self._stalls:
            return
        step = self.step_seconds
        seconds = None if step is None else step * self._steps
        now = self._found._replace(steps=self._steps, seconds=seconds)
        if self._auto and self._steps != self._measured:
            # Measured, but not used yet.
            now = now._replace(reason=self._reported.reason)
        self._reported = now
        notify(lambda observer: observer.paced(now))

    @property
    def steps(self) -> int:
        """Number of steps between two saves, as used now."""
        return self._steps

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step while no save runs; None before `due` was called."""
        return statistics.median(self._alone) if self._alone else None

    @property
    def step_seconds_during(self) -> float | None:
        """Seconds of a step beside a save; None if no step ended during one."""
        return statistics.median(self._beside) if self._beside else None

    @property
    def slowdown(self) -> float | None:
        """Share of its speed that training loses beside a save; None if not measured."""
        alone, beside = self.step_seconds, self.step_seconds_during
        if alone is None or beside is None or beside <= 0:
            return None
        return min(1.0, max(0.0, 1 - alone / beside))

    def _mtbf_seconds(self) -> float:
        if self._failures_per_hour is not None:
            return 3600 / self._failures_per_hour
        past = self._past()
        # Time of this run without a failure counts as evidence.
        exposure = past.recent_exposure_seconds + time.perf_counter() - self._began_seconds
        is_known = past.recent_failures >= _FAILURES_KNOWN
        prior = None if is_known else mtbf(_nodes(), NODE_RATE)
        (rate,) = rate_quantiles(past.recent_failures, exposure, (0.5,), prior)
        return 1 / rate

    def _past(self, began: float | None = None) -> Summary:
        """The history of the runs before, as it was at the first question."""
        if self._history is None:
            try:
                self._history = summarize(self._root, began=began)
            except OSError:
                self._history = Summary()
        return self._history


def _nodes() -> int:
    """Number of nodes of the job."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    on_node = int(here) if here.isdigit() and int(here) else RANKS_PER_NODE
    return math.ceil(own_size() / on_node)
