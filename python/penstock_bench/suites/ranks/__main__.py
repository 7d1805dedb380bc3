"""The command behind `make bench SUITE=ranks`."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from penstock_bench.harness import memory, plots, tables
from penstock_bench.harness.options import free_port, names_option
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample, Samples
from penstock_bench.results.spread import Spread, plain
from penstock_bench.suites.ranks import planning, voting, worker
from penstock_bench.suites.ranks.planning import CASES
from penstock_bench.workloads.states import GIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Group
    from rich.table import Table

PENSTOCK, ALONE = "penstock", "penstock-alone"
DCP = ("dcp-1", "dcp-4")
SAVE, LOAD, LOAD_ALONE = "save", "load", "load by one"
OPERATIONS = (SAVE, LOAD, LOAD_ALONE)
_RATE = "gb_per_second"


@dataclass(frozen=True)
class Entry:
    """A library as this suite runs it."""

    library: str
    threads: int
    is_alone: bool
    note: str


# In the order of the first round.
ENTRIES = {
    PENSTOCK: Entry("penstock", 0, False, "penstock.save by every rank"),
    ALONE: Entry("penstock", 0, True, "one process has and saves everything"),
    "dcp-1": Entry("dcp", 1, False, "FileSystemWriter(sync_files=True), 1 thread a rank"),
    "dcp-4": Entry("dcp", 4, False, "the same, 4 threads a rank"),
}

_SIZE_GIB, _QUICK_SIZE_GIB = 2.0, 1 / 16
_TENSORS, _QUICK_TENSORS = 10_000, 1000
_FREE_TIMES_STATE = 1.2


@suite(
    "ranks",
    ENTRIES,
    "Who saves",
    preload=[
        f"penstock_bench.suites.ranks.{module}" for module in ("worker", "planning", "voting")
    ],
    default="all; '': only plans",
)
@names_option("--cases", "cases", tuple(CASES), "What to plan", "all; '': nothing")
@click.option("--ranks", type=click.IntRange(min=2, max=64), default=4, show_default=True)
@click.option("--size-gib", type=click.FloatRange(min=0.001), help="Of the state in all. [2]")
def main(run: Run, cases: tuple[str, ...], ranks: int, size_gib: float | None) -> Report:
    """Save and load with several ranks, and plan for thousands."""
    size_bytes = int((size_gib or (_QUICK_SIZE_GIB if run.is_quick else _SIZE_GIB)) * GIB)
    tensors = _QUICK_TENSORS if run.is_quick else _TENSORS
    settings = {"ranks": ranks, "size_bytes": size_bytes, "tensors": tensors}
    plans: list[dict[str, Any]] = []
    votes: list[dict[str, Any]] = []
    run.results.extra |= {"plans": plans, "votes": votes}
    with run.at_work(_FREE_TIMES_STATE * size_bytes, **settings) as place:
        run.say("touching memory")
        memory.warm(size_bytes)
        for index, name in run.in_rounds(run.names):
            _turn(run, name, index)
        worlds = planning.WORLDS[::2] if run.is_quick else planning.WORLDS
        pairs = [(case, world) for case in cases for world in worlds]
        for case, world in run.each(pairs, lambda one: f"planning for {one[1]}: {one[0]}"):
            plan = planning.Task(case, world, tensors, str(place))
            plans.append({"case": case, "ranks": world, **run.child(planning.run, plan)})
        voters = (voting.WORLDS[:2] if run.is_quick else voting.WORLDS) if cases else ()
        for world in run.each(voters, lambda one: f"votes of {one}"):
            directory = place / f"votes-{world}"
            directory.mkdir()
            task = voting.Task(world, str(directory))
            votes.append({"ranks": world, **run.child(voting.run, task)})
            shutil.rmtree(directory)
    results = run.results
    return Report(
        _tables(results),
        {
            "gb_per_second": {
                row: {one: plain(results.spread(row, _RATE, operation=one)) for one in OPERATIONS}
                for row in results.rows
            },
            "ratios": {title: plain(found) for title, found in ratios(results)},
        },
        functools.partial(_draw, results),
    )


def _turn(run: Run, name: str, index: int) -> None:
    """Saves, and loads the checkpoint."""
    ranks = 1 if ENTRIES[name].is_alone else run.results.settings["ranks"]
    if _operate(run, name, index, SAVE, ranks):
        if ranks > 1:
            _operate(run, name, index, LOAD, ranks)
        _operate(run, name, index, LOAD_ALONE, 1)
    shutil.rmtree(run.place / "checkpoint", ignore_errors=True)


def _operate(run: Run, name: str, index: int, operation: str, ranks: int) -> bool:
    """Measures one operation of all ranks; returns whether it succeeded."""
    entry, port = ENTRIES[name], free_port()
    tasks = [
        worker.Task(
            library=entry.library,
            threads=entry.threads,
            operation="save" if operation == SAVE else "load",
            rank=rank,
            ranks=ranks,
            size_bytes=run.results.settings["size_bytes"],
            directory=str(run.place / "checkpoint"),
            port=port,
            is_checked=index == 0,
        )
        for rank in range(ranks)
    ]
    found = run.children(worker.run, tasks, (name, operation))
    failed = [one for one in found if "error" in one]
    run.results.add(Sample(name, index, operation), (failed or found)[0])
    for path in run.place.glob("checkpoint-warm-up-*"):
        shutil.rmtree(path)
    return not failed


def ratios(results: Samples[Sample]) -> list[tuple[str, Spread | None]]:
    """The ratios of rates."""

    def over(operation: str, *lower: str) -> Spread | None:
        return results.ratio(PENSTOCK, *lower, figure=_RATE, operation=operation)

    return [
        ("save by all ranks / by one process", over(SAVE, ALONE)),
        ("save by all ranks / the best DCP", over(SAVE, *DCP)),
        ("load by all ranks / the best DCP", over(LOAD, *DCP)),
        ("load by one / the best DCP", over(LOAD_ALONE, *DCP)),
    ]


def _tables(results: Samples[Sample]) -> Group:
    parts: list[Any] = []
    if results.samples:
        words = {row: ENTRIES[row].note for row in results.rows}
        shown = tables.ratios(ratios(results), "ratio of rates", missing="not measured")
        parts += [_rates(results), *tables.notes(results.errors(), words), shown]
    if results.extra["plans"]:
        parts += ["", _plans(results), *tables.notes([], CASES), "", _votes(results)]
    return tables.page(results, *parts)


def _rates(results: Samples[Sample]) -> Table:
    settings = results.settings
    sizes = [one.nbytes for one in results.samples if one.error is None]
    size = f"{max(sizes) / 1e9:.2f} GB in all, " if sizes else ""
    return tables.figures(
        f"{settings['ranks']} ranks, {size}{settings['rounds']} interleaved rounds; GB/s of all"
        " ranks together, median [least, most]",
        ["save", f"load by {settings['ranks']}", "load by 1"],
        {
            row: [tables.cell(results.spread(row, _RATE, operation=one)) for one in OPERATIONS]
            for row in results.rows
        },
    )


def _plans(results: Samples[Sample]) -> Table:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "ranks": lambda one: str(one["ranks"]),
        "seconds": lambda one: f"{one['spread_seconds'] + one['job_seconds']:.3f}",
        "of these\nspread": lambda one: f"{one['spread_seconds']:.3f}",
        "of these\nnative": lambda one: f"{one['job_seconds']:.3f}",
        "first\ntime": lambda one: f"{one['first_seconds']:.3f}",
        "pieces\nto write": lambda one: f"{one['pieces']:,}",
        "a vote,\nbytes": lambda one: f"{one['vote_bytes']:,}",
        "all votes,\nbytes": lambda one: f"{one['gather_bytes']:,}",
    }
    table = tables.figures(
        f"What rank 0 plans, of {results.settings['tensors']:,} tensors; no communication",
        list(columns),
        {},
        first="case",
    )
    for plan in results.extra["plans"]:
        if plan.get("error"):
            table.add_row(plan["case"], str(plan["ranks"]), f"FAILED: {plan['error']}")
        else:
            table.add_row(plan["case"], *(show(plan) for show in columns.values()))
    return table


def _votes(results: Samples[Sample]) -> Table:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "a rank,\nms": lambda one: f"{1000 * one['member_seconds']:.3f}",
        "its\nrequests": lambda one: f"{one['requests']:.1f}",
        "rank 0:\nvotes s": lambda one: f"{one['coordinator_seconds']:.3f}",
        "rank 0:\nparts s": lambda one: f"{one['check_seconds']:.3f}",
        "rank 0:\ncommit s": lambda one: f"{one['commit_seconds']:.3f}",
        "manifest,\nbytes": lambda one: f"{one['manifest_bytes']:,}",
    }
    return tables.figures(
        "Messages, votes and commit of a save, all ranks in one process: no network",
        list(columns),
        {
            f"{one['ranks']:,} ranks": (
                [f"FAILED: {one['error']}"]
                if one.get("error")
                else [show(one) for show in columns.values()]
            )
            for one in results.extra["votes"]
        },
        first="",
    )


def _draw(results: Samples[Sample], path: Path) -> None:
    """Plots rates, and the time to plan by the number of ranks."""
    with plots.figure(path, 2) as (left, right):
        width = 0.8 / len(OPERATIONS)
        for place, operation in enumerate(OPERATIONS):
            every = [results.spread(row, _RATE, operation=operation) for row in results.rows]
            known = {index: one for index, one in enumerate(every) if one}
            at = [index + (place - 1) * width for index in known]
            medians, errors = plots.medians(list(known.values()))
            left.bar(at, medians, width, yerr=errors, capsize=2, label=operation)
        left.set_xticks(range(len(results.rows)), results.rows)
        left.set_ylabel("GB/s, all ranks together", fontsize=8)
        plans = [one for one in results.extra["plans"] if not one.get("error")]
        for case in CASES:
            found = [one for one in plans if one["case"] == case]
            right.plot(
                [one["ranks"] for one in found],
                [one["spread_seconds"] + one["job_seconds"] for one in found],
                marker="o",
                label=case,
            )
        votes = [one for one in results.extra["votes"] if not one.get("error")]
        right.plot(
            [one["ranks"] for one in votes],
            [one["member_seconds"] for one in votes],
            marker="s",
            label="messages and votes",
        )
        right.set_xscale("log", base=2)
        right.set_ylim(bottom=0)
        right.set_xlabel("ranks", fontsize=8)
        right.set_ylabel("seconds to plan, one rank", fontsize=8)


if __name__ == "__main__":
    main()
