"""Advice: how often to save, what it costs, what a failure loses, and which inputs were guesses."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.planning.inputs import RESTART, SLOWDOWN, Cluster, Training
from penstock.planning.models.failures import SECONDS_PER_DAY
from penstock.planning.models.interval import Shares, best_period, save_cost, shares
from penstock.planning.models.levels import drive_days, drive_writes_per_day
from penstock.planning.models.quantity import Quantity, given

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Advice:
    """An answer to "how often should I save?".

    Attributes:
        interval: Seconds from the start of one save to the start of the next; its spread is that of
            the inputs.
        goodput: Share of time that is training which counts; its spread is that of the inputs.
        shares: Where the rest of the time goes, at the middle of all inputs.
        steps: The interval in steps, or None.
        lost_seconds: Mean training time that one failure undoes.
        failures_per_day: Mean number of failures in a day.
        saves_per_day: Number of saves in a day of uninterrupted training.
        bytes_per_day: Bytes written in that day, or None.
        capacity_bytes: Bytes of all checkpoints kept and of the one being written, or None.
        drive_days: Days until the drives' endurance is used up, or None.
        drive_writes_per_day: Drive writes per day of each drive, or None.
        dollars_per_month: Price of the copies in a bucket, or None.
        guesses: Inputs that are documented defaults.
        notes: Further sentences for the reader.
        inputs: All inputs by name.
        training: The run that it is for.
        cluster: The machines that it is for.
    """

    interval: Quantity
    goodput: Quantity
    shares: Shares
    steps: int | None
    lost_seconds: float
    failures_per_day: float
    saves_per_day: float
    bytes_per_day: float | None
    capacity_bytes: float | None
    drive_days: float | None
    drive_writes_per_day: float | None
    dollars_per_month: float | None
    guesses: tuple[str, ...]
    notes: tuple[str, ...]
    inputs: dict[str, Quantity] = field(repr=False)
    training: Training = field(repr=False)
    cluster: Cluster = field(repr=False)

    def with_nodes(self, nodes: int) -> Advice:
        """The advice for the same run on another number of nodes.

        Raises:
            ValueError: The number of nodes of this advice is unknown.
        """
        return plan(self.training, self.cluster.with_nodes(nodes))

    def shares_at(self, period_seconds: float) -> Shares:
        """Shares of the time with another interval, at the middle of all inputs.

        Raises:
            ValueError: The period is shorter than a save takes.
        """
        middle = _Point.of(self.inputs)
        if period_seconds < middle.period_min:
            raise ValueError(
                f"a period of {period_seconds:g} s: a save takes {middle.period_min:g} s, and one "
                "is in flight at a time"
            )
        return middle.shares(period_seconds)

    @property
    def period_min(self) -> float:
        """The shortest period in seconds: a save's time, as one is in flight at a time."""
        return _Point.of(self.inputs).period_min

    def as_json(self) -> dict[str, Any]:
        """The advice as plain JSON; times in seconds."""
        return {
            "interval_seconds": self.interval.value,
            "interval_seconds_low": self.interval.bounds[0],
            "interval_seconds_high": self.interval.bounds[1],
            "interval_steps": self.steps,
            "goodput": self.goodput.value,
            "goodput_low": self.goodput.bounds[0],
            "goodput_high": self.goodput.bounds[1],
            "shares": {
                "goodput": self.shares.goodput,
                "saving": self.shares.saving,
                "lost": self.shares.lost,
                "down": self.shares.down,
                "restarting": self.shares.restarting,
            },
            "lost_seconds_per_failure": self.lost_seconds,
            "failures_per_day": self.failures_per_day,
            "saves_per_day": self.saves_per_day,
            "bytes_per_day": self.bytes_per_day,
            "capacity_bytes": self.capacity_bytes,
            "drive_days": self.drive_days,
            "drive_writes_per_day": self.drive_writes_per_day,
            "dollars_per_month": self.dollars_per_month,
            "guesses": list(self.guesses),
            "notes": list(self.notes),
            "inputs": {name: one.as_json() for name, one in self.inputs.items()},
        }


def plan(training: Training, cluster: Cluster) -> Advice:
    """Computes the advice for a run on a cluster.

    The interval is `interval.best_period` of the inputs' middles, but not shorter than a save takes
    to become durable: one save is in flight at a time. Low and high ends come from all combinations
    of the ends of the inputs.

    Raises:
        ValueError: An input is out of range.
    """
    inputs = _inputs(training, cluster)
    middle = _Point.of(inputs)
    period, result = middle.period(), middle.shares()
    ends = [_Point(**values) for values in _corners(inputs)]
    periods = [end.period() for end in ends]
    goodputs = [end.shares().goodput for end in ends]
    interval = Quantity(
        period, "s", "computed", "advice", min(period, *periods), max(period, *periods)
    )
    goodput = Quantity(
        result.goodput,
        "",
        "computed",
        "advice",
        min(result.goodput, *goodputs),
        max(result.goodput, *goodputs),
    )
    saves = SECONDS_PER_DAY / period
    written = None if training.save_bytes is None else training.save_bytes.value * saves
    return Advice(
        interval=interval,
        goodput=goodput,
        shares=result,
        steps=None if training.step is None else max(1, round(period / training.step.value)),
        lost_seconds=middle.lost_per_failure(),
        failures_per_day=SECONDS_PER_DAY / middle.mtbf,
        saves_per_day=saves,
        bytes_per_day=written,
        guesses=tuple(name for name, one in inputs.items() if one.is_guess),
        notes=tuple(_notes(middle, cluster, training, result)),
        inputs=inputs,
        training=training,
        cluster=cluster,
        **_storage(training, cluster, written, saves),
    )


@dataclass(frozen=True)
class _Point:
    """One value for each input of the model."""

    NAMES = ("stall", "durable", "restart", "slowdown", "mtbf", "detection")

    stall: float
    durable: float
    restart: float
    slowdown: float
    mtbf: float
    detection: float

    @classmethod
    def of(cls, inputs: dict[str, Quantity]) -> _Point:
        """The middle of all inputs."""
        return cls(**{name: inputs[name].value for name in cls.NAMES})

    @property
    def cost(self) -> float:
        return save_cost(self.stall, self.durable, self.slowdown)

    @property
    def lag(self) -> float:
        return max(0.0, self.durable - self.stall)

    @property
    def period_min(self) -> float:
        """Shortest period: one save is in flight at a time."""
        return max(self.durable, self.stall * 1.000001)

    def period(self) -> float:
        """Best period."""
        return max(best_period(self.cost, self.mtbf), self.period_min)

    def shares(self, period_seconds: float | None = None) -> Shares:
        """Shares of the time with a period; None for the best."""
        period = self.period() if period_seconds is None else period_seconds
        return shares(
            period,
            min(self.cost, period * 0.999999),
            self.mtbf,
            restart_seconds=self.restart,
            down_seconds=self.detection,
            lag_seconds=self.lag,
        )

    def lost_per_failure(self) -> float:
        """Mean time that a failure undoes: M - E[N] P, with the saves in it."""
        result = self.shares()
        total = result.goodput + result.saving + result.lost
        return self.mtbf * result.lost / total if total else self.mtbf


def _inputs(training: Training, cluster: Cluster) -> dict[str, Quantity]:
    durable = training.durable or training.stall
    stall = training.stall or durable
    if stall is None or durable is None:
        raise ValueError("nothing is known of saves: give the time of one")
    if cluster.mtbf is None:
        raise ValueError("nothing is known of failures: give the mean time between two")
    inputs = {
        "stall": stall,
        "durable": durable,
        "restart": training.restart or RESTART,
        "mtbf": cluster.mtbf,
        "detection": cluster.detection,
    }
    if durable.bounds[1] > stall.bounds[0]:
        inputs["slowdown"] = training.slowdown or SLOWDOWN
    else:
        inputs["slowdown"] = given(0.0, "", "nothing runs beside a synchronous save")
    if not cluster.mtbf.bounds[0] > 0:
        raise ValueError("mtbf: expected more than 0 s between failures")
    if not durable.value > 0:
        raise ValueError("save-seconds: a save takes more than 0 s")
    if inputs["slowdown"].bounds[1] > 1:
        raise ValueError(f"slowdown: {inputs['slowdown'].value:g} is no share, which is 0 to 1")
    for name, one in (("step", training.step), ("save_bytes", training.save_bytes)):
        if one is not None:
            if not one.value > 0:
                raise ValueError(f"{name}: expected more than 0 {one.unit}")
            inputs[name] = one
    return inputs


def _corners(inputs: dict[str, Quantity]) -> Iterator[dict[str, float]]:
    """All combinations of the ends of the inputs' spreads."""
    ends = [sorted(set(inputs[name].bounds)) for name in _Point.NAMES]
    for values in itertools.product(*ends):
        corner = dict(zip(_Point.NAMES, values, strict=True))
        corner["durable"] = max(corner["durable"], corner["stall"])
        yield corner


def _storage(
    training: Training, cluster: Cluster, written: float | None, saves: float
) -> dict[str, float | None]:
    """Capacity, life of the drives and price of a bucket."""
    facts: dict[str, float | None] = dict.fromkeys(
        ("capacity_bytes", "drive_days", "drive_writes_per_day", "dollars_per_month")
    )
    if training.save_bytes is None or written is None:
        return facts
    size, drives, prices = training.save_bytes.value, cluster.drives, cluster.prices
    facts["capacity_bytes"] = size * (cluster.keep + 1)
    if drives is not None:
        each = written / drives.count
        facts["drive_writes_per_day"] = drive_writes_per_day(
            each, drives.capacity_bytes, drives.write_amplification
        )
        if drives.endurance_bytes is not None:
            facts["drive_days"] = drive_days(
                each, drives.endurance_bytes, drives.write_amplification
            )
    if prices is not None:
        puts = saves * 30 * math.ceil(size / prices.part_bytes)
        facts["dollars_per_month"] = (
            size * cluster.keep / 1e9 * prices.gb_month + puts / 1000 * prices.thousand_puts
        )
    return facts


def _notes(point: _Point, cluster: Cluster, training: Training, result: Shares) -> Iterator[str]:
    if point.durable > best_period(point.cost, point.mtbf):
        yield (
            "Saves take longer than the best interval: the next one begins when the last one is "
            "durable. Faster storage, or fewer bytes a rank, would raise the goodput."
        )
    if point.restart + point.detection > point.mtbf:
        yield "Failures come faster than the job restarts: more than half of the time is lost."
    if result.goodput < 0.5:
        yield "Less than half of the time is training that counts."
    drives = cluster.drives
    if drives is not None and training.save_bytes is not None:
        needed = training.save_bytes.value * (cluster.keep + 1)
        if needed > drives.count * drives.capacity_bytes:
            yield "The checkpoints kept, and the one being written, do not fit on the drives."
