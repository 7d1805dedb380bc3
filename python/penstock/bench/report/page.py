"""The page: what its template is given."""

from __future__ import annotations

import itertools
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import do_filesizeformat

from penstock.bench.gather_cases import REFERENCE
from penstock.bench.gathered import miss_curves, row_rates
from penstock.bench.report import plots
from penstock.bench.report.grids import grids
from penstock.bench.report.lines import all_cases, measurers, panels, passes, plain
from penstock.bench.report.palette import COLOURS
from penstock.bench.report.row_tables import row_tables
from penstock.bench.report.tables import remarks, tables
from penstock.bench.tokens import token_rates, token_roofline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markupsafe import Markup

    from penstock.bench.report.lines import Panel
    from penstock.bench.results import Results

PLOTS_MAX = 12
"""Of one kind: what somebody may look at."""


_CHOSEN = (
    " Of many cases those are drawn that stand at equal steps in their order, from the fastest to "
    "the slowest."
)


class Plot(NamedTuple):
    """A drawing with its title, and what part of the cases is in it where it is not all."""

    title: str
    part: str
    drawing: Markup


class Plots(NamedTuple):
    """Drawings of one kind, and how they are meant."""

    title: str
    note: str
    plots: list[Plot]


def page(runs: list[Results]) -> str:
    """The page that shows these runs."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Identifiers are those of one page.
    names = (f"plot-{number}" for number in itertools.count(1))
    return environment.get_template("page.html.j2").render(
        runs=[_shown(results, names) for results in runs], colours=COLOURS
    )


def _shown(results: Results, names: Iterator[str]) -> dict[str, Any]:
    command = results.machine.get("command")
    facts = {name: value for name, value in results.machine.items() if name != "command"}
    return {
        "kind": results.kind,
        "directory": results.disk.get("directory"),
        "created": _time(results.created),
        "command": shlex.join(["penstock", *map(str, command[1:])])
        if isinstance(command, list)
        else "",
        "cases": len(all_cases(results)),
        "rounds": len({one.round_index for one in results.measurements}),
        "names": _names(results),
        "remarks": remarks(results),
        "failed": sum(bool(one.error) for one in results.measurements),
        "tables": [*row_tables(results), *tables(results)],
        "plots": [some for some in _plots(results, names) if some.plots],
        "facts": {
            "Machine": list(_facts(facts)),
            "Disk": list(_facts(results.disk)),
            "Settings": list(_facts(results.settings)),
        },
    }


def _names(results: Results) -> list[str]:
    """Who measured; policies that were counted and moved nothing are none of them."""
    moved = {one.by for one in results.measurements if one.nbytes or one.error}
    return [name for name in measurers(results) if name in moved or len(moved) < 2]


def _plots(results: Results, names: Iterator[str]) -> Iterator[Plots]:
    if rates := token_rates(results):
        yield Plots(
            "Tokens a second",
            "Of each token behind the first: medians of the rounds, with the least and the most.",
            [
                Plot(
                    "",
                    "",
                    plots.rate_bars(
                        rates,
                        next(names),
                        label="Tokens a second",
                        unit="tokens a second; dashed: what reading or computing allows at most",
                        most=token_roofline(results),
                    ),
                )
            ],
        )
    yield from _gathered(results, names)
    lines, passed, found = panels(results), passes(results), grids(results)
    by = next(iter(measurers(results)), "")
    yield _lined(
        "Throughput over time",
        "Of each case the round in the middle, in steps of a tenth of a second, in long runs of "
        "more; the last counts with the one before. What took less than 0.3 s is not here.",
        [(panel, plots.timeline(results, panel, next(names))) for panel in lines],
    )
    yield _lined(
        "Latency by percentile",
        "Medians over the rounds of each percentile.",
        [(panel, plots.latency(results, panel, next(names))) for panel in lines],
    )
    maps = [Plot(grid.title, "", plots.heat_map(grid, next(names))) for grid in found]
    yield _at_most("Rates over two settings", f"GB/s with fsync, medians of {by}.", maps)
    yield _lined(
        "Pass by pass",
        "GB/s with fsync: the mean of a pass, with the least and the most.",
        [(one.panel, plots.pass_bars(results, one, next(names))) for one in passed],
    )


def _gathered(results: Results, names: Iterator[str]) -> Iterator[Plots]:
    """Of rows by id."""
    made = []
    for case, rates in row_rates(results).items():
        label = f"Rows a second, {case}"
        bars = plots.rate_bars(rates, next(names), label=label, unit="rows a second")
        made.append(Plot(plain(case), "", bars))
    yield Plots("Rows a second", "Medians of the rounds, with the least and the most.", made)
    if curves := miss_curves(results):
        # A model that has the same as ours is no line of its own.
        curves.pop(REFERENCE, None)
        note = (
            "Of the ids that caches serve, by policy and by the size of the cache; windows: batches"
            " that are known ahead. No byte is read."
        )
        yield Plots("Hits", note, [Plot("", "", plots.hit_curves(curves, next(names)))])


def _lined(title: str, note: str, drawn: list[tuple[Panel, Markup | None]]) -> Plots:
    made = [
        Plot(panel.title, panel.part, drawing) for panel, drawing in drawn if drawing is not None
    ]
    return _at_most(title, note + (_CHOSEN if any(one.part for one in made) else ""), made)


def _at_most(title: str, note: str, made: list[Plot]) -> Plots:
    if len(made) > PLOTS_MAX:
        note += f" The first {PLOTS_MAX} of {len(made)} plots."
    return Plots(title, note, made[:PLOTS_MAX])


def _time(created: str) -> str:
    try:
        return datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return created


def _facts(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Names and values in words; what is nothing is left out."""
    for key, value in tree.items():
        name = f"{above}{key.removesuffix('_bytes').replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _facts(value, f"{name}: ")
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif key.endswith("_bytes") and isinstance(value, (int, float)):
            yield name, do_filesizeformat(value, binary=True)
        elif isinstance(value, list):
            yield name, ", ".join(_number(one) for one in value)
        elif value not in (None, ""):
            yield name, _number(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
