"""Several levels of checkpoints, copies on neighbours, and lives of drives.

A level is a place with its own cost and its own class of failures: memory of the host survives a
crash of the process, a neighbour's copy the loss of a host, a bucket the loss of the cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Level:
    """A place of checkpoints, with the failures that only it and higher levels survive.

    Attributes:
        name: Name in reports, as ``local``.
        cost_seconds: Training time that one save to it takes.
        rate_per_second: Failures that need this level: lower levels do not survive them.
        lag_seconds: Time from the stall's end until the copy can be loaded.
        restart_seconds: Time to start again from it.
    """

    name: str
    cost_seconds: float
    rate_per_second: float
    lag_seconds: float = 0.0
    restart_seconds: float = 0.0


@dataclass(frozen=True)
class LevelPlan:
    """Levels that are worth their cost, lowest first, each with its period.

    Attributes:
        levels: The levels that remain; failures of a level left out are in the one above it.
        periods_seconds: Period of each, an integer multiple of the one below.
        waste: Share of time that is lost to saves, repeated work, restarts and downtime.
    """

    levels: tuple[Level, ...]
    periods_seconds: tuple[float, ...]
    waste: float


def plan_levels(levels: Sequence[Level], *, down_seconds: float = 0.0) -> LevelPlan:
    """Chooses levels and periods that waste least, in the first order.

    The waste is the sum over levels of C/P + rate (P/2 + L + R + D), so P = sqrt(2 C / rate), and a
    level is dropped where that is cheaper (Di, Robert, Vivien, Cappello, TPDS 28(1), 2017; Benoit
    et al., ICPP'16). Periods are rounded to integer multiples of the level below, the better of
    the two.

    Raises:
        ValueError: There is no level, or a number is out of range.
    """
    if not levels:
        raise ValueError("no level of checkpoints: name at least one")
    for level in levels:
        if level.cost_seconds <= 0 or level.rate_per_second < 0:
            raise ValueError(
                f"level {level.name!r}: expected a cost above 0 and a rate of 0 or more"
            )
    best: LevelPlan | None = None
    for chosen in range(1, 2 ** len(levels)):
        if not chosen >> (len(levels) - 1):
            continue  # The highest level is the only one that survives its failures.
        kept = _merged(levels, chosen)
        plan = _with_periods(kept, down_seconds)
        if best is None or plan.waste < best.waste:
            best = plan
    assert best is not None
    return best


def _merged(levels: Sequence[Level], chosen: int) -> tuple[Level, ...]:
    """The chosen levels; failures of the others go to the next one above."""
    kept, pending = [], 0.0
    for index, level in enumerate(levels):
        pending += level.rate_per_second
        if chosen >> index & 1:
            kept.append(
                Level(
                    level.name,
                    level.cost_seconds,
                    pending,
                    level.lag_seconds,
                    level.restart_seconds,
                )
            )
            pending = 0.0
    return tuple(kept)


def _with_periods(levels: tuple[Level, ...], down_seconds: float) -> LevelPlan:
    periods: list[float] = []
    for level in levels:
        rate = level.rate_per_second
        wanted = math.sqrt(2 * level.cost_seconds / rate) if rate else math.inf
        if periods and math.isfinite(wanted):
            below = periods[-1]
            fewer = max(1, math.floor(wanted / below))
            wanted = min(
                (fewer * below, (fewer + 1) * below),
                key=lambda period: level.cost_seconds / period + level.rate_per_second * period / 2,
            )
        periods.append(wanted)
    waste = sum(
        level.cost_seconds / period
        + (
            level.rate_per_second
            * (period / 2 + level.lag_seconds + level.restart_seconds + down_seconds)
            if level.rate_per_second
            else 0.0
        )
        for level, period in zip(levels, periods, strict=True)
    )
    return LevelPlan(levels, tuple(periods), min(1.0, waste))


def copies_survive(hosts: int, copies: int, lost: int) -> float:
    """Probability that each host's checkpoint is left after `lost` hosts fail at once.

    Hosts form groups of `copies` hosts that hold one another's checkpoints (Gemini, SOSP'23): data
    are lost if a whole group fails. 1 - #{sets of lost hosts that hold a whole group} / C(N, k), by
    inclusion and exclusion.

    Raises:
        ValueError: The hosts cannot be grouped, or more are lost than there are.
    """
    if copies < 1 or hosts < 1 or hosts % copies or not 0 <= lost <= hosts:
        raise ValueError(
            f"{hosts} hosts in groups of {copies}, {lost} lost: expected whole groups, and at most "
            "as many lost as there are"
        )
    groups, total = hosts // copies, math.comb(hosts, lost)
    fatal = sum(
        (-1) ** (one + 1)
        * math.comb(groups, one)
        * math.comb(hosts - one * copies, lost - one * copies)
        for one in range(1, lost // copies + 1)
    )
    return 1 - float(fatal / total)


def drive_days(
    bytes_per_day: float, endurance_bytes: float, write_amplification: float = 1.0
) -> float:
    """Days until a drive has taken the bytes that its maker warrants (TBW); inf for no writes."""
    written = bytes_per_day * write_amplification
    return endurance_bytes / written if written > 0 else math.inf


def drive_writes_per_day(
    bytes_per_day: float, capacity_bytes: float, write_amplification: float = 1.0
) -> float:
    """Drive writes per day (DWPD) that the bytes of a day are."""
    return bytes_per_day * write_amplification / capacity_bytes
