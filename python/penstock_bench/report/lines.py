"""Which lines a plot has.

A plot belongs to one pattern, with a colour for each case, or to one case, with a colour for each
of those who measured it. Of many, those are drawn that stand at equal steps in the order of rates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.common.page.palette import SERIES
from penstock_bench.harness.cases import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock_bench.results.results import Measurement, Results
    from penstock_bench.results.spread import Spread

COLOURS_MAX = len(SERIES)
_LABEL_CHARACTERS_MAX = 60


class Line(NamedTuple):
    """Measurements of one case by one of those who did.

    Attributes:
        case: Its label.
        by: Who.
        colour_label: What its colour stands for.
        colour_index: Which colour.
        dash_index: Which of those who measured, where colours stand for cases.
    """

    case: str
    by: str
    colour_label: str
    colour_index: int
    dash_index: int


class Panel(NamedTuple):
    """The lines of one plot.

    Lines are dashed by who measured where there are names. The part says how many cases, or of
    those who measured, are drawn, where it is not all.
    """

    title: str
    lines: list[Line]
    names: list[str]
    part: str


class Passes(NamedTuple):
    """Cases that are passes of one.

    The lines of the panel have the case of the first pass; labels of cases are by the number of
    the pass.
    """

    panel: Panel
    cases: dict[int, str]


def all_cases(results: Results) -> dict[str, dict[str, Any]]:
    """The settings of every case, also of one that was measured and not announced."""
    return {one.case: {} for one in results.measurements} | results.cases


def measurers(results: Results) -> list[str]:
    """Who measured, in the order in which they were asked for."""
    asked = results.settings.get("writers", results.settings.get("by", []))
    names = asked.split(",") if isinstance(asked, str) else asked
    found = dict.fromkeys(one.by for one in results.measurements)
    return [*(by for by in names if by in found), *(by for by in found if by not in names)]


def spread(
    results: Results, case: str, by: str, value: Callable[[Measurement], float]
) -> Spread | None:
    """Median and range; None also where nothing was moved, or in no time that a clock sees."""
    try:
        return results.spread(case, by, value)
    except ZeroDivisionError:
        return None


def durable_rate(results: Results, case: str, by: str) -> float | None:
    """The median with the sync, GB/s."""
    found = spread(results, case, by, lambda one: one.durable_gb_per_second)
    return found and found.median


def durable_rates(results: Results, case: str, by: str) -> list[float]:
    """Of every measurement, with the sync, GB/s."""
    measured = results.of(case, by)
    return [one.durable_gb_per_second for one in measured if one.nbytes and one.seconds]


def plain(text: str) -> str:
    """A label in one line that a drawing can hold."""
    return "".join(character if character.isprintable() else " " for character in text)


def shortened(text: str) -> str:
    """A label that fits below a plot."""
    text = plain(text)
    return text if len(text) <= _LABEL_CHARACTERS_MAX else f"{text[:_LABEL_CHARACTERS_MAX]}…"


def told_apart(labels: Sequence[str]) -> tuple[list[str], str]:
    """Labels without the words that all of them have, and these words."""
    words = [label.split(", ") for label in labels]
    if len(words) < 2:
        return list(labels), ""
    common = [word for word in words[0] if all(word in other for other in words)]
    rest = [", ".join(word for word in some if word not in common) for some in words]
    return [short or label for short, label in zip(rest, labels, strict=True)], ", ".join(common)


def panels(results: Results) -> list[Panel]:
    """The lines of every plot that there is something to draw for."""
    groups: dict[str, list[str]] = {}
    for case, settings in all_cases(results).items():
        groups.setdefault(str(settings.get("pattern", case)), []).append(case)
    found = [_panel(results, title, cases) for title, cases in groups.items()]
    return [panel for panel in found if panel.lines]


def passes(results: Results) -> list[Passes]:
    """One for each set of cases that differ in nothing but the pass."""
    groups: dict[str, dict[int, str]] = {}
    for case, settings in results.cases.items():
        if "pass" in settings:
            others = {name: value for name, value in settings.items() if name != "pass"}
            groups.setdefault(repr(sorted(others.items())), {})[settings["pass"]] = case
    found = []
    for group in groups.values():
        cases = list(group.values())
        chosen, part = at_equal_steps(
            {by: _first_rate(results, ((case, by) for case in cases)) for by in measurers(results)}
        )
        lines = [Line(cases[0], by, by, index, 0) for index, by in enumerate(chosen)]
        if lines:
            title = plain(told_apart(cases)[1] or cases[0])
            found.append(Passes(Panel(title, lines, [], part), group))
    return found


def _panel(results: Results, title: str, cases: list[str]) -> Panel:
    names = measurers(results)
    if len(cases) == 1:
        (case,) = cases
        chosen, part = at_equal_steps({by: durable_rate(results, case, by) for by in names})
        lines = [Line(case, by, by, index, 0) for index, by in enumerate(chosen)]
        return Panel(plain(case), lines, [], part)
    chosen, part = at_equal_steps(
        {case: _first_rate(results, ((case, by) for by in names)) for case in cases}
    )
    short, common = told_apart(cases)
    labels = dict(zip(cases, short, strict=True))
    lines = [
        Line(case, by, labels[case], index, dash)
        for index, case in enumerate(chosen)
        for dash, by in enumerate(names)
        if results.of(case, by)
    ]
    return Panel(plain(common or title), lines, names if len(names) > 1 else [], part)


def _first_rate(results: Results, pairs: Iterable[tuple[str, str]]) -> float | None:
    """Of several cases, or of several who measured one, the first that has a result."""
    return next((rate for pair in pairs if (rate := durable_rate(results, *pair))), None)


def at_equal_steps(
    rates: dict[str, float | None], most: int = COLOURS_MAX
) -> tuple[list[str], str]:
    """Those to draw, the fastest and the slowest among them, and what part of all they are."""
    present = {name: rate for name, rate in rates.items() if rate is not None}
    if len(present) <= most:
        # As they were measured.
        return list(present), ""
    ordered = sorted(present, key=lambda name: -present[name])
    steps = np.linspace(0, len(ordered) - 1, most).round().astype(int)
    return [ordered[step] for step in steps], f"{most} of {len(ordered)}"


AXES = {
    "block_bytes": "block",
    "depth": "requests in flight",
    "threads": "threads",
    "processes": "processes",
}


class Grid(NamedTuple):
    """Cases that differ in two settings only.

    Values of the settings ascend; rates are GB/s by row and column, None where there is no
    case.
    """

    title: str
    row_name: str
    column_name: str
    rows: list[str]
    columns: list[str]
    rates: list[list[float | None]]


def grids(results: Results) -> list[Grid]:
    """One for each combination of the other settings; of who measured first."""
    by = next(iter(measurers(results)), "")
    measured = {
        case: settings
        for case, settings in results.cases.items()
        if settings.keys() >= AXES.keys() and durable_rate(results, case, by) is not None
    }
    values = {axis: {settings[axis] for settings in measured.values()} for axis in AXES}
    varying = [axis for axis in AXES if len(values[axis]) > 1]
    chosen = sorted(varying, key=lambda axis: -len(values[axis]))[:2]
    if len(chosen) < 2:
        return []
    row_axis, column_axis = (axis for axis in AXES if axis in chosen)
    groups: dict[str, list[str]] = {}
    for case, settings in measured.items():
        others = {name: value for name, value in settings.items() if name not in chosen}
        groups.setdefault(repr(sorted(others.items())), []).append(case)
    found = []
    for cases in groups.values():
        cells = {
            (measured[case][row_axis], measured[case][column_axis]): durable_rate(results, case, by)
            for case in cases
        }
        rows, columns = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
        if min(len(rows), len(columns)) < 2:
            continue
        fixed = [axis for axis in varying if axis not in chosen]
        same = [f"{AXES[axis]}: {_text(axis, measured[cases[0]][axis])}" for axis in fixed]
        found.append(
            Grid(
                plain(", ".join([told_apart(cases)[1], *same])),
                AXES[row_axis],
                AXES[column_axis],
                [_text(row_axis, row) for row in rows],
                [_text(column_axis, column) for column in columns],
                [[cells.get((row, column)) for column in columns] for row in rows],
            )
        )
    return found


def _text(axis: str, value: Any) -> str:
    return size(value) if axis == "block_bytes" else str(value)
