"""The command behind `make bench SUITE=planning`: predictions against a run with planted kills.

Kills come at exponential times of a seed that is chosen before. The durations that go into a
prediction were told by the processes of the same run, so both see the same noise of the machine.
Restarts are those of further processes between the kills: of killed ones only the quick starts end.
The runs that are compared lose their processes in turn, each after the same seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from penstock.common.console import console, json_option, print_json, table
from penstock.planning import Training, advise, cluster_of, shares
from penstock.planning import measured as samples
from penstock.planning.simulation import ClusterModel, JobModel, Scenario, simulate
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.options import directory_option
from penstock_bench.suites.planning.kills import Inputs, KilledRun, run_calmly

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

WALL_BAR = (0.9, 1.1)
"""Predicted time over measured time."""

SWEEP_BAR = 1.10
"""Lost time at the advised interval over the least of a sweep."""

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Intervals that are run, in units of the advised one."""

SWEEP = tuple(2 ** (power / 4) for power in range(-8, 13))
"""Intervals that are simulated, in the same units."""

_NEEDED_BYTES = 2e9
_FIRST_EVERY = 20
_PILOTS = 3
_PILOT_SAVES = 6
_KILLS_BETWEEN = 3
"""Kills between two starts that nobody kills."""

_MTBF_RESTARTS = 5.0
_MTBF_SECONDS = (4.0, 6.0)
"""Mean time to a kill: some restarts, within bounds that keep a run below ten minutes."""

_SIMULATED_RUNS = 2000
_SIMULATED_FAILURES = 200


@dataclass(frozen=True)
class Outcome:
    """One interval.

    Attributes:
        factor: The interval in units of the advised one.
        every: Steps between two saves.
        kills: Number of kills.
        seconds: Measured time.
        replayed: Predicted seconds for the steps that were kept, by a simulation with the same
            kills.
        expected: The same by the formula, from the mean time to a kill alone.
        lost: Share of the measured time that is no training that counts.
    """

    factor: float
    every: int
    kills: int
    seconds: float
    replayed: float
    expected: float
    lost: float


def scenario(inputs: Inputs, mtbf_seconds: float, period_seconds: float) -> Scenario:
    """The run as the simulator takes it."""
    return Scenario(
        "run",
        ClusterModel(failures_per_1000_node_days=1000 * 86_400 / mtbf_seconds),
        JobModel(
            save_seconds=inputs.durable,
            stall_seconds=inputs.stall,
            slowdown=inputs.slowdown,
            interval_seconds=max(period_seconds, inputs.durable),
            detection_seconds=0.0,
            start_seconds=inputs.restart,
        ),
    )


def outcome(run: KilledRun, factor: float, gaps: Floats, mtbf_seconds: float) -> Outcome:
    """Compares a run with its predictions."""
    inputs = run.inputs
    gaps = gaps[: run.kills]
    trained = run.kept_steps() * inputs.step
    period = inputs.period(run.every)
    made = scenario(inputs, mtbf_seconds, period)
    days = float(gaps.sum()) / 86_400
    replayed = float(simulate(made, days=days, runs=run.kills, gaps=gaps).goodput.mean())
    expected = shares(
        max(period, inputs.durable),
        inputs.cost,
        float(gaps.mean()),
        restart_seconds=inputs.restart,
        lag_seconds=inputs.durable - inputs.stall,
    ).goodput
    # Simulated runs begin with training, the measured ones with a start.
    return Outcome(
        factor=factor,
        every=run.every,
        kills=run.kills,
        seconds=run.seconds,
        replayed=trained / replayed + inputs.restart,
        expected=trained / expected + inputs.restart,
        lost=1 - trained / run.seconds,
    )


@dataclass(frozen=True)
class Swept:
    """A simulated interval.

    Attributes:
        factor: The interval in units of the advised one.
        lost: Share of the time that is no training that counts.
        avoidable: The part of it that the interval decides: saves, and work that failures undo.
    """

    factor: float
    lost: float
    avoidable: float


def swept(inputs: Inputs, mtbf_seconds: float, every: int) -> list[Swept]:
    """Simulates each interval of the sweep, with the same failures."""
    points = []
    for factor in SWEEP:
        steps = max(1, round(every * factor))
        period = inputs.period(steps)
        made = scenario(inputs, mtbf_seconds, period)
        days = _SIMULATED_FAILURES * mtbf_seconds / 86_400
        found = simulate(made, days=days, runs=_SIMULATED_RUNS, seed=1)
        avoidable = float((found.saving + found.lost).mean())
        points.append(Swept(steps / every, 1 - float(found.goodput.mean()), avoidable))
    return points


def advised_steps(inputs: Inputs, mtbf_seconds: float) -> int:
    """Steps between two saves as `advise` answers from the measured durations."""
    source, seconds = "runs that nobody killed", inputs.seconds
    training = Training(
        stall=samples(seconds["stall"], "s", source),
        durable=samples(seconds["durable"], "s", source),
        slowdown=samples([inputs.slowdown], "", source),
        restart=samples(seconds["restart"], "s", source),
        step=samples(seconds["step"], "s", source),
    )
    steps = advise(training=training, cluster=cluster_of(mtbf_seconds=mtbf_seconds)).steps
    return max(1, steps or 1)


@dataclass(frozen=True)
class Measured:
    """All that was measured and predicted.

    Attributes:
        mtbf_seconds: The mean that times to a kill were drawn with.
        inputs: Durations at the advised interval.
        outcomes: Those of the intervals that were run.
        sweep: Simulated intervals.
    """

    mtbf_seconds: float
    inputs: Inputs
    outcomes: list[Outcome]
    sweep: list[Swept]


def measure(place: Path, unit_gaps: Floats, kills_others: int) -> Measured:
    """Runs everything.

    Args:
        place: A directory for the stores.
        unit_gaps: Times from each start to its kill, in units of their mean.
        kills_others: Kills at the other intervals, after the first of the same times.
    """
    pilot = Inputs()
    for _ in range(_PILOTS):
        run_calmly(place / "calm", _FIRST_EVERY, _PILOT_SAVES, pilot)
    low, high = _MTBF_SECONDS
    mtbf_seconds = min(max(_MTBF_RESTARTS * pilot.restart, low), high)
    gaps = unit_gaps * mtbf_seconds
    every = advised_steps(pilot, mtbf_seconds)
    counts = {factor: max(1, round(every * factor)) for factor in FACTORS}
    runs = {
        factor: KilledRun(place / f"every-{steps}", steps)
        for factor, steps in counts.items()
        if pilot.period(steps) >= pilot.durable
    }
    calm = Inputs()
    for index, gap in enumerate(gaps):
        if index % _KILLS_BETWEEN == 0:
            run_calmly(place / "calm", 1, 1, calm)
        for factor, run in runs.items():
            if factor == 1 or index < kills_others:
                run.kill_after(float(gap))
    for run in runs.values():
        run.inputs.seconds["restart"] = calm.seconds["restart"]
    found = [outcome(run, factor, gaps, mtbf_seconds) for factor, run in runs.items()]
    inputs = runs[1.0].inputs
    return Measured(mtbf_seconds, inputs, found, swept(inputs, mtbf_seconds, every))


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=50, show_default=True)
@click.option(
    "--kills-others",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Kills at intervals that are not the advised one.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the times of the kills.")
@directory_option
@json_option
def main(kills: int, kills_others: int, seed: int, directory: Path, as_json: bool) -> None:
    """Train with planted kills, and compare the time with the prediction; 6 to 10 minutes.

    Exits with 1 if a bar is missed.
    """
    gaps = np.random.default_rng(seed).exponential(1.0, kills)
    directory.mkdir(parents=True, exist_ok=True)
    with workplace(directory, _NEEDED_BYTES) as place:
        measured = measure(place, gaps, kills_others)
    inputs, found, sweep = measured.inputs, measured.outcomes, measured.sweep
    main_run = next(one for one in found if one.factor == 1)
    ratios = {
        "replayed": main_run.replayed / main_run.seconds,
        "expected": main_run.expected / main_run.seconds,
        "avoidable": next(one.avoidable for one in sweep if one.factor == 1)
        / min(one.avoidable for one in sweep),
        "lost": main_run.lost / min(one.lost for one in found),
    }
    if as_json:
        names = ("step", "stall", "durable", "slowdown", "restart", "cost")
        print_json(
            {
                "seed": seed,
                "mtbf_seconds": measured.mtbf_seconds,
                "inputs": {name: getattr(inputs, name) for name in names},
                "intervals": [one.__dict__ for one in found],
                "sweep": [one.__dict__ for one in sweep],
                "ratios": ratios,
            }
        )
    else:
        _print(measured, ratios)
    low, high = WALL_BAR
    if not (low <= ratios["replayed"] <= high and ratios["avoidable"] <= SWEEP_BAR):
        raise SystemExit(1)


def _print(measured: Measured, ratios: dict[str, Any]) -> None:
    inputs, found, sweep = measured.inputs, measured.outcomes, measured.sweep
    out = console()
    out.print(
        f"a step {inputs.step:.4f} s, a save {inputs.durable:.3f} s and of training "
        f"{inputs.cost:.4f} s, a restart {inputs.restart:.3f} s: {len(inputs.seconds['stall'])} "
        f"saves and {len(inputs.seconds['restart'])} restarts measured; a kill each "
        f"{measured.mtbf_seconds:.2f} s",
        "",
    )
    shown = table(
        "interval", "steps", "kills", "measured s", "replayed", "expected", "lost", "simulated",
        "avoidable",
        numbers=("steps", "kills", "measured s", "replayed", "expected", "lost", "simulated",
                 "avoidable"),
    )  # fmt: skip
    for one in found:
        distances = [abs(math.log(point.factor / one.factor)) for point in sweep]
        near = sweep[distances.index(min(distances))]
        shown.add_row(
            f"{one.factor:g} x advised",
            str(one.every),
            str(one.kills),
            f"{one.seconds:.1f}",
            f"{one.replayed / one.seconds:.3f}",
            f"{one.expected / one.seconds:.3f}",
            f"{one.lost:.1%}",
            f"{near.lost:.1%}",
            f"{near.avoidable:.1%}",
        )
    out.print(shown, "")
    out.print(
        "replayed, expected: predicted time over measured, by a simulation of the same kills and "
        "by the formula from their mean; lost: time that is no training which counts; simulated: "
        "the same, of many runs; avoidable: the part of it that the interval decides."
    )
    out.print(
        f"the advised interval against the best of {len(sweep)} simulated: "
        f"{ratios['avoidable']:.3f} times its avoidable loss; against the best of {len(found)} "
        f"measured: {ratios['lost']:.3f} times its loss"
    )


if __name__ == "__main__":
    main()
