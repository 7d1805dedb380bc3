"""The tables of a page: every case in each of them, one row for each of those who measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock_bench.peers.gather import OURS
from penstock_bench.report.lines import all_cases, durable_rate, durable_rates, measurers, spread
from penstock_bench.results.results import BEYOND_MIN, latencies
from penstock_bench.suites.gather import gathered
from penstock_bench.suites.stream.tokens import token_rates

if TYPE_CHECKING:
    from penstock_bench.results.results import Measurement, Results

NOTHING = "–"  # noqa: RUF001 - the dash of a table

_SYNC_PART_MIN = 0.001
"""The least part of a sync in the time before it that changes a rate of three digits."""


class Cell(NamedTuple):
    """A figure, and the range it is the median of."""

    text: str
    spread: str = ""


class Table(NamedTuple):
    """Rows by case and by who measured.

    Some columns hold words and not figures.
    """

    title: str
    note: str
    columns: list[str]
    words: list[str]
    rows: dict[str, dict[str, list[Cell]]]

    def without_empty_columns(self) -> Table:
        """The same, less the columns in which there is nothing."""
        cells = [row for rows in self.rows.values() for row in rows.values()]
        kept = [
            index
            for index in range(len(self.columns))
            if any(row[index].text != NOTHING for row in cells)
        ]
        rows = {
            case: {by: [row[index] for index in kept] for by, row in some.items()}
            for case, some in self.rows.items()
        }
        return self._replace(columns=[self.columns[index] for index in kept], rows=rows)


def tables(results: Results) -> list[Table]:
    """All of them that there is something for."""
    made = [
        _tokens(results),
        _rates(results),
        _latencies(results),
        _totals(results),
        _paths(results),
    ]
    return [table for table in made if table is not None and table.rows]


def _filled(
    results: Results, cells: Callable[[str, str], list[Cell]]
) -> dict[str, dict[str, list[Cell]]]:
    names = measurers(results)
    measured: dict[str, dict[str, bool]] = {case: {} for case in all_cases(results)}
    for one in results.measurements:
        is_told = measured[one.case].get(one.by, False)
        measured[one.case][one.by] = is_told or bool(one.nbytes or one.error)
    # Not everybody has measured everything; and what moved no bytes has a table of its own.
    return {
        case: {by: cells(case, by) for by in names if by in some or not some}
        for case, some in measured.items()
        if not some or any(some.values())
    }


def _tokens(results: Results) -> Table | None:
    """Of generated text."""
    if not token_rates(results):
        return None

    def cells(case: str, by: str) -> list[Cell]:
        def median(value: Callable[[Measurement], float | None], form: str) -> Cell:
            found = [one for made in results.of(case, by) if (one := value(made)) is not None]
            if not found:
                return Cell(NOTHING)
            ends = f"[{min(found):{form}}, {max(found):{form}}]" if len(found) > 1 else ""
            return Cell(f"{np.median(found):{form}}", ends)

        return [
            median(lambda one: 1 / one.token_seconds if one.token_seconds else None, ".2f"),
            median(lambda one: one.first_token_seconds, ".2f"),
            median(lambda one: one.memory_over_bytes and one.memory_over_bytes / 1e6, ",.0f"),
            median(lambda one: one.budget_bytes and one.budget_bytes / 1e6, ",.0f"),
            median(lambda one: one.token_seconds and one.nbytes / 1e9, ",.2f"),
            median(
                lambda one: None if one.written_bytes is None else one.written_bytes / 1e6, ",.1f"
            ),
        ]

    note = (
        "Medians of all rounds [least, most]. Memory is what was resident at most, without what "
        "the same process takes for a model of nearly nothing; MB are 10⁶ bytes."
    )
    columns = ["tokens/s", "first token s", "memory MB", "budget MB", "read GB", "written MB"]
    return Table("Tokens", note, columns, [], _filled(results, cells)).without_empty_columns()


def _rates(results: Results) -> Table:
    has_fio = "fio" in measurers(results)
    counts = Counter((one.case, one.by) for one in results.measurements if not one.error)
    # Where all have as many, the page says so above.
    has_other_counts = len(set(counts.values())) > 1

    def cells(case: str, by: str) -> list[Cell]:
        def median(value: Callable[[Measurement], float], form: str) -> Cell:
            found = spread(results, case, by, value)
            if found is None or not found.most:
                return Cell(NOTHING)
            # Of IOPS it is the range of the rate once more; of one round there is none.
            has_range = form != ",.0f" and len(results.of(case, by)) > 1
            ends = f"[{found.least:{form}}, {found.most:{form}}]" if has_range else ""
            return Cell(f"{found.median:{form}}", ends)

        made = results.of(case, by)
        return [
            Cell(str(len(made)) if has_other_counts else NOTHING),
            median(lambda one: one.durable_gb_per_second, ".3f"),
            _ratio(results, case, by) if has_fio else Cell(NOTHING),
            # Where the sync took no time it is the same rate.
            median(lambda one: one.gb_per_second, ".3f")
            if any(one.sync_seconds > _SYNC_PART_MIN * one.seconds for one in made)
            else Cell(NOTHING),
            median(lambda one: one.requests_per_second, ",.0f"),
            median(lambda one: one.cpu_seconds_per_gib, ".3f"),
        ]

    note = (
        "Medians of all rounds [least, most]; without: where the sync took time. GB is 10⁹ bytes, "
        "GiB is 2³⁰."
    )
    if has_fio:
        note += " The time of fio includes the sync, so that both of its rates are with it."
    columns = [
        "rounds", "GB/s with fsync", "ratio to fio", "GB/s without", "IOPS", "CPU s/GiB",
    ]  # fmt: skip
    return Table("Rates", note, columns, [], _filled(results, cells)).without_empty_columns()


def _ratio(results: Results, case: str, by: str) -> Cell:
    ours, theirs = durable_rate(results, case, by), durable_rate(results, case, "fio")
    return Cell(f"{ours / theirs:.2f}" if by != "fio" and ours and theirs else NOTHING)


def _latencies(results: Results) -> Table | None:
    names = dict.fromkeys(name for one in results.measurements for name in one.latency_us)
    if not names:
        return None

    def cells(case: str, by: str) -> list[Cell]:
        found = latencies(results, case, by)
        return [Cell(f"{found[name]:,.1f}" if name in found else NOTHING) for name in names]

    note = (
        "Microseconds that so many per cent of requests stay within; medians of all rounds. A "
        f"percentile is here where {BEYOND_MIN} requests or more of a round lie beyond it."
    )
    rows = _filled(results, cells)
    return Table("Latency by case", note, list(names), [], rows).without_empty_columns()


def _totals(results: Results) -> Table | None:
    """Where one figure would hide how it came about: several processes, or several checkpoints."""

    def cells(case: str, by: str) -> list[Cell]:
        measured = [one for one in results.of(case, by) if one.nbytes and one.seconds]
        alone = [one.rate_spread for one in measured if len(one.rate_spread) > 1]
        if not alone and (results.kind != "checkpoint" or len(measured) < 2):
            return []
        seconds = sum(one.seconds + one.sync_seconds for one in measured)
        total = sum(one.nbytes for one in measured) / seconds / 1e9
        mean = np.mean(durable_rates(results, case, by))
        found = [NOTHING] * 3
        if alone:
            kinds = (sum, min, max)
            found = [f"{np.median([value(rates) for rates in alone]):.3f}" for value in kinds]
        return [
            Cell(f"{total:.3f}"),
            Cell(f"{mean:.3f}"),
            Cell(str(len(alone[0])) if alone else NOTHING),
            *map(Cell, found),
        ]

    filled = _filled(results, cells)
    rows = {
        case: some
        for case, by_measurer in filled.items()
        if (some := {by: found for by, found in by_measurer.items() if found})
    }
    if not rows:
        return None
    note = (
        "GB/s. All bytes in all the time of the slowest process, sync included; the mean of the "
        "rates of all rounds; and what processes reached each in its own time, which in sum is "
        "more than the total where they did not end together."
    )
    columns = ["total / total", "mean of rates", "processes", "sum", "slowest", "fastest"]
    return Table("Totals and means", note, columns, [], rows).without_empty_columns()


_Show = Callable[[list["Measurement"]], str]


def _paths(results: Results) -> Table:
    def median(value: Callable[[Measurement], float | None], form: str) -> _Show:
        def show(measured: list[Measurement]) -> str:
            values = [found for one in measured if (found := value(one)) is not None]
            return f"{np.median(values):{form}}" if values else NOTHING

        return show

    def words(value: Callable[[Measurement], str]) -> _Show:
        def show(measured: list[Measurement]) -> str:
            return " and ".join(filter(None, dict.fromkeys(map(value, measured)))) or NOTHING

        return show

    def counted(name: str) -> _Show:
        return median(lambda one: one.metadata.get(name), ",.0f")

    calls = dict.fromkeys(name for one in results.measurements for name in one.metadata)
    columns: dict[str, _Show] = {
        "requests": words(lambda one: "direct" if one.is_direct else "buffered"),
        **{name: counted(name) for name in calls},
        "checked": median(lambda one: one.checked or None, ",.0f"),
        # Who did not time it has none.
        "open ms": median(lambda one: 1000 * one.open_seconds or None, ",.2f"),
        # Of checkpoints only.
        "cached": median(lambda one: one.resident_fraction, ".1%"),
        "stall s": median(lambda one: one.stall_seconds, ".3f"),
        "synced by": words(lambda one: one.synced_by),
        "setup": words(lambda one: one.setup),
    }
    rows = _filled(
        results,
        lambda case, by: [Cell(show(results.of(case, by))) for show in columns.values()],
    )
    return Table(
        "Requests and files",
        "Calls that concern files, in one round, with what it took to make and open them before.",
        list(columns),
        ["requests", "synced by", "setup"],
        rows,
    ).without_empty_columns()


def remarks(results: Results) -> list[tuple[str, str, str, str, int]]:
    """Errors and notes: the case, who measured, which of the two, the words, and how often."""
    counted: Counter[tuple[str, str, str, str]] = Counter()
    for one in results.measurements:
        if one.error:
            counted[one.case, one.by, "error", one.error] += 1
        counted.update((one.case, one.by, "note", note) for note in one.notes)
    return sorted((*key, times) for key, times in counted.items())


def row_tables(results: Results) -> list[Table]:
    """All of them that there is something for."""
    made = [_gathered_rows(results), _comparisons(results), _misses(results)]
    return [table for table in made if table.rows]


def _gathered_rows(results: Results) -> Table:
    """Of rows by id."""
    rates = gathered.row_rates(results)

    def hits(one: Measurement) -> float | None:
        found = gathered.hit_rate(one)
        return found and 100 * found

    def cells(case: str, by: str) -> list[Cell]:
        times = None if by == OURS else gathered.times_of(results, case, by)
        ranges = [
            gathered.spread_of(results, case, by, gathered.rate),
            times,
            *(
                gathered.spread_of(results, case, by, value)
                for value in (
                    gathered.requests_per_row,
                    gathered.read_per_byte,
                    hits,
                    gathered.cpu_seconds_per_million,
                )
            ),
        ]
        return [
            Cell(NOTHING) if found is None else Cell(*found.texts(gathered.figure))
            for found in ranges
        ]

    note = (
        f"Medians of all rounds [least, most]; times: as fast {OURS} is, round by round; read:"
        " bytes from storage for each byte of the rows, as the kernel counts them."
    )
    columns = ["rows/s", "times", "requests a row", "read", "hits %", "CPU s a million rows"]
    rows = {case: {by: cells(case, by) for by in some} for case, some in rates.items()}
    return Table("Rows", note, columns, [], rows).without_empty_columns()


def _comparisons(results: Results) -> Table:
    """Of rows by id, ours by others."""
    rows: dict[str, dict[str, list[Cell]]] = {}
    for one in gathered.comparisons(results):
        rows.setdefault(one.case, {})[one.words] = [Cell(*one.found.texts(gathered.ratio))]
    note = f"{OURS} by another one, round by round [least, most]; of caches, over their sizes."
    return Table("Ratios", note, ["ratio"], [], rows)


def _misses(results: Results) -> Table:
    """Of caches, by policy."""
    curves = gathered.miss_curves(results)
    parts = sorted({part for curve in curves.values() for part in curve})
    rows = {
        by: {
            "misses %": [
                Cell(f"{100 * curve[part]:.2f}" if part in curve else NOTHING) for part in parts
            ]
        }
        for by, curve in curves.items()
    }
    note = "Of rows that were asked for, by the part of the table that is kept."
    return Table("Misses", note, [f"{part:.0%}" for part in parts], [], rows)
