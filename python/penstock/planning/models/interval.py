"""Formulas for one level of checkpoints: best interval, expected time, goodput.

All times are seconds. The symbols of the literature stand in the docstrings:

| symbol | name here | meaning |
|---|---|---|
| M | `mtbf_seconds` | mean time between failures of the whole job |
| C | `cost_seconds` | training time that one save takes: its stall, and what it slows down |
| P | `period_seconds` | time from the start of one save to the start of the next |
| L | `lag_seconds` | time from the end of the stall until the checkpoint can be loaded |
| D | `down_seconds` | time from a failure until the restart begins: detection, spares |
| R | `restart_seconds` | time to start the job and load the checkpoint; may fail itself |

Failures are exponential unless a function says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_NEWTON_STEPS = 60


def save_cost(stall_seconds: float, durable_seconds: float, slowdown: float) -> float:
    """Training time that one save takes.

    C = C_b + a (C_d - C_b): the stall, and the share `slowdown` of the time during which the save
    runs beside the training (Checkpoint-Freq, FAST'21, calls it the overhead of the persist phase).

    Args:
        stall_seconds: Time for which training stands still, C_b.
        durable_seconds: Time from the call until the checkpoint is on stable storage, C_d. At least
            the stall: a synchronous save has both equal.
        slowdown: Share of its speed, 0 to 1, that training loses while a save is in flight.
    """
    return stall_seconds + slowdown * max(0.0, durable_seconds - stall_seconds)


def young(cost_seconds: float, mtbf_seconds: float) -> float:
    """Young's period, P = sqrt(2 M C) + C (Young, CACM 17(9), 1974)."""
    return math.sqrt(2 * mtbf_seconds * cost_seconds) + cost_seconds


def daly(
    cost_seconds: float, mtbf_seconds: float, restart_seconds: float, down_seconds: float
) -> float:
    """Daly's period, P = sqrt(2 (M + D + R) C) + C (Daly, FGCS 22(3), 2006, first order)."""
    lost = mtbf_seconds + down_seconds + restart_seconds
    return math.sqrt(2 * lost * cost_seconds) + cost_seconds


def rfo(
    cost_seconds: float, mtbf_seconds: float, restart_seconds: float, down_seconds: float
) -> float:
    """The refined first-order period, P = sqrt(2 (M - D - R) C) (arXiv 1302.3752).

    Raises:
        ValueError: A failure costs more time than passes between two.
    """
    lost = mtbf_seconds - down_seconds - restart_seconds
    if lost <= 0:
        raise ValueError(
            f"recovery takes {down_seconds + restart_seconds:g} s, and a failure comes each "
            f"{mtbf_seconds:g} s: the first-order formula holds for rarer failures"
        )
    return math.sqrt(2 * lost * cost_seconds)


def best_period(cost_seconds: float, mtbf_seconds: float) -> float:
    """The period that minimizes the expected time, for exponential failures.

    P = C + M (1 + W0(-exp(-C/M - 1))) (Daly 2006; arXiv 1302.3752). Restart, downtime and lag
    multiply the expected time without moving its minimum. Solved as y + exp(-y) - 1 = C/M for
    y = P/M, which loses no digits where C is small beside M.
    """
    cost = cost_seconds / mtbf_seconds
    if cost <= 0:
        return 0.0
    y = cost + math.sqrt(2 * cost)
    for _ in range(_NEWTON_STEPS):
        step = (y + math.expm1(-y) - cost) / -math.expm1(-y)
        y -= step
        if abs(step) <= 1e-14 * y:
            break
    return y * mtbf_seconds


@dataclass(frozen=True)
class Shares:
    """Shares of a job's time, which add up to 1.

    Attributes:
        goodput: Training that counts. Meta calls it ETTR, the effective training time ratio (arXiv
            2410.21680).
        saving: Time that saves took from training.
        lost: Training and saves that a failure undid.
        down: From a failure until the restart begins.
        restarting: Starts, and loads of checkpoints.
    """

    goodput: float
    saving: float
    lost: float
    down: float
    restarting: float


def shares(
    period_seconds: float,
    cost_seconds: float,
    mtbf_seconds: float,
    *,
    restart_seconds: float = 0.0,
    down_seconds: float = 0.0,
    lag_seconds: float = 0.0,
) -> Shares:
    """Shares of time of a long job with exponential failures, exactly.

    Between two failures a job is up for X, exponential with mean M. The first checkpoint after a
    restart can be loaded at P + L, each further one P later, so E[N] = exp(-(P + L)/M) /
    (1 - exp(-P/M)) checkpoints count, of P - C training each. A cycle takes (M + D) exp(R/M), as
    restarts fail too. With L = 0 this is the exact formula of Daly 2006.

    Raises:
        ValueError: The period is not longer than what a save costs, or a time is out of range.
    """
    check_times(mtbf_seconds, cost_seconds, restart_seconds, down_seconds, lag_seconds)
    _check_period(period_seconds, cost_seconds)
    ratio = period_seconds / mtbf_seconds
    if ratio + lag_seconds / mtbf_seconds > 700:
        kept = 0.0
    else:
        kept = math.exp(-lag_seconds / mtbf_seconds) / math.expm1(ratio)
    growth = math.exp(min(restart_seconds / mtbf_seconds, 700.0))
    return _shares_of_cycle(
        kept,
        period_seconds,
        cost_seconds,
        mtbf_seconds,
        down_seconds=down_seconds * growth,
        restart_seconds=mtbf_seconds * (growth - 1),
    )


def shares_weibull(
    period_seconds: float,
    cost_seconds: float,
    mtbf_seconds: float,
    shape: float,
    *,
    restart_seconds: float = 0.0,
    down_seconds: float = 0.0,
    lag_seconds: float = 0.0,
) -> Shares:
    """Shares of time where the time from a restart to the next failure is Weibull.

    A shape below 1 means failures that come in groups: 0.65 to 0.89 on LANL's systems (Schroeder
    and Gibson, DSN'06). Restarts are taken not to fail, so the result is for a recovery that is
    short beside the mean time between failures. E[N] is the sum of P(X > i P + L) for i = 1, 2, ….

    Raises:
        ValueError: The shape or a time is out of range.
    """
    check_times(mtbf_seconds, cost_seconds, restart_seconds, down_seconds, lag_seconds)
    _check_period(period_seconds, cost_seconds)
    if not 0.2 <= shape <= 10:
        raise ValueError(f"a Weibull shape of {shape:g}: expected 0.2 to 10, and 1 is exponential")
    scale = mtbf_seconds / math.gamma(1 + 1 / shape)
    kept, count = 0.0, 0
    while count < 10_000_000:
        count += 1
        left = math.exp(-(((count * period_seconds + lag_seconds) / scale) ** shape))
        kept += left
        if left < 1e-12 * max(kept, 1e-300):
            break
    return _shares_of_cycle(
        kept,
        period_seconds,
        cost_seconds,
        mtbf_seconds,
        down_seconds=down_seconds,
        restart_seconds=restart_seconds,
    )


def _shares_of_cycle(
    kept: float,
    period_seconds: float,
    cost_seconds: float,
    up_seconds: float,
    *,
    down_seconds: float,
    restart_seconds: float,
) -> Shares:
    """Shares of the mean time from one failure of a running job to the next.

    Args:
        kept: Mean number of checkpoints that count.
        period_seconds: Time from the start of one save to the start of the next.
        cost_seconds: Training time that a save takes.
        up_seconds: Mean time in which the job runs.
        down_seconds: Mean time of detection, for all restarts of a cycle.
        restart_seconds: Mean time of its restarts.
    """
    cycle = up_seconds + down_seconds + restart_seconds
    return Shares(
        goodput=kept * (period_seconds - cost_seconds) / cycle,
        saving=kept * cost_seconds / cycle,
        lost=(up_seconds - kept * period_seconds) / cycle,
        down=down_seconds / cycle,
        restarting=restart_seconds / cycle,
    )


def _check_period(period_seconds: float, cost_seconds: float) -> None:
    if not period_seconds > cost_seconds:
        raise ValueError(
            f"a period of {period_seconds:g} s leaves no time to train: one save costs "
            f"{cost_seconds:g} s of it"
        )


def goodput_first_order(
    period_seconds: float,
    cost_seconds: float,
    mtbf_seconds: float,
    *,
    restart_seconds: float = 0.0,
    down_seconds: float = 0.0,
    lag_seconds: float = 0.0,
) -> float:
    """(1 - C/P)(1 - (D + R + L + P/2)/M), for failures that are rare; at least 0."""
    lost = down_seconds + restart_seconds + lag_seconds + period_seconds / 2
    return max(0.0, 1 - cost_seconds / period_seconds) * max(0.0, 1 - lost / mtbf_seconds)


def ettr(
    failures_per_node_day: float,
    nodes: int,
    *,
    period_seconds: float,
    restart_seconds: float,
    save_seconds: float = 0.0,
) -> float:
    """Expected effective training time ratio as Meta defines it (arXiv 2410.21680, section IV).

    (1 - N r (u0 + P/2)) / (1 + w/P) with the failure rate r of a node, the restart's overhead u0
    and the time w that a save stops training. At least 0.
    """
    rate = failures_per_node_day * nodes / 86_400
    lost = rate * (restart_seconds + period_seconds / 2)
    return max(0.0, 1 - lost) / (1 + save_seconds / period_seconds)


def check_times(mtbf_seconds: float, *others: float) -> None:
    """Refuses times that no job has.

    Raises:
        ValueError: A time is negative or not finite, or the mean time between failures is zero.
    """
    if not (math.isfinite(mtbf_seconds) and mtbf_seconds > 0):
        raise ValueError(
            f"a mean time between failures of {mtbf_seconds!r} s: expected more than 0"
        )
    for one in others:
        if not (math.isfinite(one) and one >= 0):
            raise ValueError(f"a time of {one!r} s: expected a finite number that is not negative")
