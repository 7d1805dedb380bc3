"""Makes a plan of the options of `penstock bench checkpoint`, and checks that there is room."""

from __future__ import annotations

import dataclasses
import shutil
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from penstock.common.machine import facts
from penstock.errors import MissingDependencyError
from penstock_bench.cli import outputs
from penstock_bench.harness.running import unused
from penstock_bench.peers.checkpoint import WRITERS
from penstock_bench.results.results import Results
from penstock_bench.suites.checkpoint.plan import Plan
from penstock_bench.workloads import scaling
from penstock_bench.workloads.models import MODELS, Model

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.suites.checkpoint.team import Launched

_AUTO_BYTES_MAX = 4 << 30
"""The most that ``--scale auto`` writes: two writers do five rounds in about two minutes."""

_AUTO_MEMORY_FRACTION = 0.25
"""The part of free memory that the state may take: loads and staging need as much each."""

_MEMORY_TIMES_STATE = 2
"""Memory for each byte of the state: the state itself, and the loaded one."""

_STAGING = "penstock-async"
"""The name of those who keep what they have staged of the state, or its beginning.

Others are measured meanwhile.
"""

_FREE_TIMES_STATE = 1.05

_AUTO_CHECKPOINTS_PER_PASS = 4

PASSES = 3


def planned(
    place: Path, asked: dict[str, Any], here: Launched | None
) -> tuple[Plan, dict[str, Any]]:
    """Makes the plan, and the settings that results record."""
    outputs.check_directory(place)
    model = _laid_out(asked)
    processes = asked["processes"] or (here.ranks if here else scaling.default_processes(model))
    if here is not None and processes != here.ranks:
        raise click.UsageError(f"--processes {processes}, and {here.ranks} were launched")
    try:
        ranks = scaling.taking_part(model, processes)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    machines = here.ranks / here.ranks_here if here else 1.0
    memory_bytes = int(scaling.memory_bytes() * machines)
    cut = _scaled(place, asked, model, ranks, memory_bytes)
    writers = _there(asked["writers"])
    name = asked["models"][0]
    parts = f"{processes} process{'es' if processes > 1 else ''}"
    plan = Plan(
        directory=str(unused(place)),
        model=cut.model,
        ranks=ranks,
        label=f"{name}, {cut.nbytes / 1e9:.4g} GB, {parts}",
        writers=writers,
        rounds=asked["rounds"],
        syncs=not asked["no_fsync"],
        verifies=asked["verify"],
        fill=asked["fill"],
        fill_bytes=asked["fill_size"],
        passes=asked["passes"] or PASSES,
    )
    _check_room(place, plan, cut, memory_bytes)
    settings = {
        **{key: value for key, value in dataclasses.asdict(plan).items() if key != "directory"},
        "name": name,
        "layout": {key: getattr(model, key) for key in ("tp", "pp", "dp", "zero")},
        "world_size": model.world_size,
        "scale": {
            "factor": cut.factor,
            "bytes": cut.nbytes,
            "full_bytes": cut.full_bytes,
            "how": cut.how,
            "is_auto": asked["factor"] is None,
        },
        "notes": {one: WRITERS[one].note for one in writers},
        "emulated": [one for one in writers if WRITERS[one].is_emulated],
        "skipped": {one: WRITERS[one].missing for one in asked["writers"] if WRITERS[one].missing},
        "is_launched": here is not None,
        "has_one_clock": True,
    }
    return plan, settings


def _laid_out(asked: dict[str, Any]) -> Model:
    """The model with the layout that was asked for."""
    model = MODELS[asked["models"][0]]
    changes = {key: asked[key] for key in ("tp", "pp", "dp", "zero") if asked[key] is not None}
    model = dataclasses.replace(model, **changes)
    if model.hidden % model.tp or model.ffn % model.tp:
        raise click.UsageError(
            f"--tp {model.tp} does not divide the widths {model.hidden} and {model.ffn}"
        )
    if model.pp > model.layers:
        raise click.UsageError(f"--pp {model.pp} is more than the {model.layers} blocks")
    return model


def _there(names: list[str]) -> list[str]:
    """The writers that are installed; of others it is said what to do."""
    found = outputs.installed(names, WRITERS)
    if not found:
        raise MissingDependencyError("none of the writers is installed", name=names[0])
    return found


def _scaled(
    place: Path, asked: dict[str, Any], model: Model, ranks: list[int], memory_bytes: int
) -> scaling.Scaled:
    if asked["factor"] is not None:
        target = scaling.rank_bytes(model, ranks) * asked["factor"]
        return scaling.scaled(model, ranks, round(target))
    usage = shutil.disk_usage(place)
    room = float(usage.free)
    if asked["fill"] is not None:
        room = asked["fill"] * usage.total - (usage.total - usage.free)
        if asked["fill_size"] is not None:
            room = asked["fill"] * asked["fill_size"]
        room /= _AUTO_CHECKPOINTS_PER_PASS
    bounds = (_AUTO_BYTES_MAX, room / _FREE_TIMES_STATE, memory_bytes * _AUTO_MEMORY_FRACTION)
    return scaling.scaled(model, ranks, int(min(bounds)))


def _check_room(place: Path, plan: Plan, cut: scaling.Scaled, memory_bytes: int) -> None:
    """Refuses what does not fit, before anything is written."""
    usage = shutil.disk_usage(place)
    needed = _FREE_TIMES_STATE * cut.nbytes
    what = f"a checkpoint of {cut.nbytes / 1e9:.3f} GB takes {needed / 1e9:.3f}"
    if plan.fill is not None and plan.fill_bytes is not None:
        needed = max(needed, plan.fill * plan.fill_bytes)
        what = f"filling {plan.fill:.0%} of {plan.fill_bytes / 1e9:.3f} GB takes {needed / 1e9:.3f}"
    if usage.free < needed:
        raise click.UsageError(
            f"{place} has {usage.free / 1e9:.3f} GB free and {what}: choose a smaller --scale or "
            "another directory"
        )
    if plan.fill is not None and not plan.has_room(0, cut.nbytes):
        of = plan.fill_bytes or usage.total
        used = 0 if plan.fill_bytes else usage.total - usage.free
        raise click.UsageError(
            f"{used / 1e9:.3f} of {of / 1e9:.3f} GB are in use, and a checkpoint of "
            f"{cut.nbytes / 1e9:.3f} GB more is above {plan.fill:.0%}: choose a smaller --scale or "
            "a larger --fill"
        )
    times, why = _MEMORY_TIMES_STATE, "twice when it is loaded"
    staging = [name for name in plan.writers if name.startswith(_STAGING)]
    if staging:
        times += len(staging)
        why = f"{times} times with what {' and '.join(staging)} stage"
    if memory_bytes < times * cut.nbytes:
        raise click.UsageError(
            f"there are {memory_bytes / 1e9:.3f} GB of memory free, and a state of "
            f"{cut.nbytes / 1e9:.3f} GB is there {why}: choose a smaller --scale or fewer "
            "--processes"
        )


def results_of(place: Path, plan: Plan, settings: dict[str, Any]) -> Results:
    """Results with nothing measured yet."""
    machine = {**facts.machine(), "torch": version("torch")}
    results = Results(kind="checkpoint", machine=machine, disk=facts.disk(place), settings=settings)
    results.cases = {
        label: {
            **case,
            "model": settings["name"],
            "bytes": settings["scale"]["bytes"],
            "layout": settings["layout"],
            "processes": len(plan.ranks),
        }
        for label, case in plan.cases.items()
    }
    return results
