"""The plots of a run in the order of the page: results first, then their details."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock_bench.peers.gather import OURS
from penstock_bench.report import plots
from penstock_bench.report.lines import (
    all_cases,
    at_equal_steps,
    durable_rate,
    durable_rates,
    grids,
    measurers,
    panels,
    passes,
    plain,
    told_apart,
)
from penstock_bench.report.plots import BARS_MAX, Bar, bars, pass_bars
from penstock_bench.suites.checkpoint import figures
from penstock_bench.suites.gather.cases import REFERENCE
from penstock_bench.suites.gather.gathered import miss_curves, row_rates
from penstock_bench.suites.stream.tokens import token_rates, token_roofline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from markupsafe import Markup

    from penstock_bench.report.lines import Panel
    from penstock_bench.results.results import Results

PLOTS_MAX = 12
"""Of one kind: what somebody may look at."""

_RANGE = "Medians of the rounds, with the least and the most."

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


def drawn(results: Results, names: Iterator[str]) -> list[Plots]:
    """All kinds that there is something to draw of."""
    made = [
        *_generated(results, names),
        *_gathered(results, names),
        *_saved(results, names),
        *_moved(results, names),
        *_courses(results, names),
    ]
    return [some for some in made if some.plots]


def _generated(results: Results, names: Iterator[str]) -> Iterator[Plots]:
    """Of generated text."""
    if rates := token_rates(results):
        drawing = bars(
            _bars(rates),
            next(names),
            label="Tokens a second",
            unit="tokens a second; dashed: what reading or computing allows at most",
            most=token_roofline(results),
        )
        note = f"Of each token behind the first. {_RANGE}"
        yield Plots("Tokens a second", note, [Plot("", "", drawing)])


def _gathered(results: Results, names: Iterator[str]) -> Iterator[Plots]:
    """Of rows by id."""
    made = []
    for case, rates in row_rates(results).items():
        label = f"Rows a second, {case}"
        drawing = bars(_bars(rates), next(names), label=label, unit="rows a second")
        made.append(Plot(plain(case), "", drawing))
    yield Plots("Rows a second", _RANGE, made)
    if curves := miss_curves(results):
        # A model that has the same as ours is no line of its own.
        curves.pop(REFERENCE, None)
        note = (
            "Of the ids that caches serve, by policy and by the size of the cache; windows: batches"
            " that are known ahead. No byte is read."
        )
        yield Plots("Hits", note, [Plot("", "", plots.hit_curves(curves, next(names)))])


def _saved(results: Results, names: Iterator[str]) -> Iterator[Plots]:
    """Of checkpoints: saves, loads, and what training waits for."""
    writers = figures.writers(results)
    made = []
    for title, found, unit in (
        ("Save", figures.rates(results, "save"), "GB/s until it is durable; more is better"),
        ("Load", figures.rates(results, "load"), "GB/s from files that are not in memory"),
        ("Stall", figures.waits(results), "seconds that training waits for a save; less is better"),
    ):
        if found:
            rates = {by: found.get(by, []) for by in writers}
            drawing = bars(_bars(rates), next(names), label=f"{title} by writer", unit=unit)
            made.append(Plot(title, "", drawing))
    note = f"{_RANGE} Training waits for all of a save that is not in the background."
    yield Plots("Saves and loads", note, made)


def _moved(results: Results, names: Iterator[str]) -> Iterator[Plots]:
    """Of requests: the rate of every case."""
    if results.kind not in ("io", "tune"):
        return
    groups: dict[str, list[str]] = {}
    for case, settings in all_cases(results).items():
        groups.setdefault(str(settings.get("pattern", "")), []).append(case)
    by_pattern = [_rates(results, cases, names) for cases in groups.values()]
    made = [plot for plot in by_pattern if plot is not None]
    yield _at_most("Throughput", f"GB/s with fsync. {_RANGE}", made)


def _rates(results: Results, cases: list[str], names: Iterator[str]) -> Plot | None:
    """The rates of cases of one pattern, a bar for each of those who measured each of them."""
    pairs = {
        f"{case}\n{by}": (case, by)
        for case in cases
        for by in measurers(results)
        if any((one.case, one.by) == (case, by) for one in results.measurements)
    }
    if not any(durable_rate(results, *pair) for pair in pairs.values()):
        return None
    chosen, part = list(pairs), ""
    if len(pairs) > BARS_MAX:
        ranked = {key: durable_rate(results, *pair) for key, pair in pairs.items()}
        chosen, part = at_equal_steps(ranked, BARS_MAX)
    short, common = told_apart(cases)
    labels = dict(zip(cases, short, strict=True))
    is_shared = len(measurers(results)) > 1
    made = []
    for case, by in (pairs[key] for key in chosen):
        label = f"{labels[case]}, {by}" if is_shared else labels[case]
        made.append(Bar(plain(label), durable_rates(results, case, by), by.startswith(OURS)))
    title = plain(common or cases[0])
    drawing = bars(made, next(names), label=f"Throughput, {title}", unit="GB/s with fsync")
    return Plot(title, part, drawing)


def _courses(results: Results, names: Iterator[str]) -> Iterator[Plots]:
    """How it came about: over time, by request, by setting, by pass."""
    lines = panels(results)
    if any(plots.has_course(one) for one in results.measurements):
        yield _lined(
            "Throughput over time",
            "Of each case the round in the middle, in steps of a tenth of a second, in long runs "
            "of more; the last counts with the one before. What took less than 0.4 s, or tells no "
            "course, is a line at its mean.",
            [(panel, plots.timeline(results, panel, next(names))) for panel in lines],
        )
    yield _lined(
        "Latency by percentile",
        "Medians over the rounds of each percentile that has requests enough.",
        [(panel, plots.latency(results, panel, next(names))) for panel in lines],
    )
    by = next(iter(measurers(results)), "")
    maps = [Plot(grid.title, "", plots.heat_map(grid, next(names))) for grid in grids(results)]
    yield _at_most("Rates over two settings", f"GB/s with fsync, medians of {by}.", maps)
    yield _lined(
        "Pass by pass",
        "GB/s with fsync: the mean of a pass, with the least and the most.",
        [(one.panel, pass_bars(results, one, next(names))) for one in passes(results)],
    )


def _bars(figures: Mapping[str, Sequence[float]]) -> list[Bar]:
    return [Bar(by, values, by.startswith(OURS)) for by, values in figures.items()]


def _lined(title: str, note: str, found: list[tuple[Panel, Markup | None]]) -> Plots:
    made = [
        Plot(panel.title, panel.part, drawing) for panel, drawing in found if drawing is not None
    ]
    return _at_most(title, note, made)


def _at_most(title: str, note: str, made: list[Plot]) -> Plots:
    note += _CHOSEN if any(one.part for one in made) else ""
    if len(made) > PLOTS_MAX:
        note += f" The first {PLOTS_MAX} of {len(made)} plots."
    return Plots(title, note, made[:PLOTS_MAX])
