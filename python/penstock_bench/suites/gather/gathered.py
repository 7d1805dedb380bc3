"""Figures of rows that were gathered in rounds: rates, ratios, and misses of caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock_bench.peers.gather import (
    CALLS,
    EXACT,
    FORESEEING,
    OURS,
    POOL,
    RESIDENT,
    REUSED,
    SCAN,
    UNCHECKED,
)
from penstock_bench.results.spread import Spread, spread
from penstock_bench.suites.gather.cases import (
    ALL,
    BATCHES,
    BELADY,
    CACHED,
    COLD,
    DENSE,
    EMULATED,
    FIO,
    FIO_POOL,
    HITS,
    ORDERED,
    POLICIES,
    REFERENCE,
    SIEVE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from penstock_bench.results.results import Measurement, Results

    _Value: TypeAlias = Callable[[Measurement], float | None]


_WHOLE_FROM = 99.95


def figure(value: float) -> str:
    """A number with three digits that count."""
    return f"{value:,.0f}" if value >= _WHOLE_FROM else f"{value:#.3g}"


def ratio(value: float) -> str:
    """A number near one, of which a hundredth matters."""
    return f"{value:.3f}"


def gathered_cases(results: Results) -> dict[str, list[str]]:
    """The libraries that gathered rows, by case, in the order of the first round."""
    found: dict[str, list[str]] = {}
    for one in results.measurements:
        if rate(one) and one.case not in found:
            found[one.case] = []
        if rate(one) and one.by not in found[one.case]:
            found[one.case].append(one.by)
    return found


def row_rates(results: Results) -> dict[str, dict[str, list[float]]]:
    """Rows a second in each round, by case and by who gathered."""
    return {
        case: {by: [found for one in results.of(case, by) if (found := rate(one))] for by in names}
        for case, names in gathered_cases(results).items()
    }


def rate(one: Measurement) -> float | None:
    """Rows a second."""
    return one.rows / one.seconds if one.rows and one.nbytes and not one.error else None


def requests_per_row(one: Measurement) -> float | None:
    """Requests to the device for each row; None of who does not count them."""
    return one.requests / one.rows if one.rows and one.requests else None


def read_per_byte(one: Measurement) -> float | None:
    """Bytes that storage gave for each byte of the rows."""
    return one.read_bytes / one.nbytes if one.nbytes and one.read_bytes is not None else None


def hit_rate(one: Measurement) -> float | None:
    """The part of the rows that were in memory or on their way; None where no row was."""
    return one.hits / one.rows if one.rows and one.hits else None


def cpu_seconds_per_million(one: Measurement) -> float | None:
    """Processor time."""
    return one.cpu_seconds / one.rows * 1e6 if one.rows else None


def spread_of(results: Results, case: str, by: str, value: _Value) -> Spread | None:
    """A figure over the rounds; None where nobody has it."""
    found = [figure for one in results.of(case, by) if (figure := value(one)) is not None]
    return spread(found)


def times_of(
    results: Results, case: str, by: str, value: _Value = rate, *, ours_by: str = OURS
) -> Spread | None:
    """How many times the figure of another one ours is, round by round; by default the rate."""
    ours, theirs = _by_round(results, case, ours_by, value), _by_round(results, case, by, value)
    return spread([ours[index] / theirs[index] for index in ours if theirs.get(index)])


def _by_round(results: Results, case: str, by: str, value: _Value) -> dict[int, float]:
    """A figure by round; the mean where it was measured before and after another."""
    found: dict[int, list[float]] = {}
    for one in results.of(case, by):
        if (figure := value(one)) is not None:
            found.setdefault(one.round_index, []).append(figure)
    return {index: float(np.mean(figures)) for index, figures in found.items()}


def request_bytes(results: Results) -> float | None:
    """Bytes that fio reads in order in the time of one random request."""
    scans = [one.read_bytes / one.seconds for one in results.of(DENSE, FIO) if one.read_bytes]
    randoms = [one.requests_per_second for one in results.of(BATCHES, FIO)]
    return float(np.median(scans) / np.median(randoms)) if scans and randoms else None


def miss_curves(results: Results) -> dict[str, dict[float, float]]:
    """The miss rate of each policy by the part of the table that is kept."""
    found: dict[str, dict[float, float]] = {}
    for case, settings in results.cases.items():
        if settings.get("pattern") == POLICIES:
            for one in results.measurements:
                if one.case == case and not one.error and one.rows and one.hits is not None:
                    found.setdefault(one.by, {})[settings["part"]] = 1 - one.hits / one.rows
    return found


class Comparison(NamedTuple):
    """A figure of ours beside another one.

    The ratio is round by round; of caches, over their sizes.
    """

    case: str
    words: str
    found: Spread


def comparisons(results: Results) -> list[Comparison]:
    """All that there are figures for."""
    return [
        Comparison(case, words, found)
        for case, words, found in _comparisons(results)
        if found is not None
    ]


def _comparisons(results: Results) -> Iterator[tuple[str, str, Spread | None]]:
    for case in (COLD, BATCHES):
        yield case, "rows a second, by fio's", times_of(results, case, FIO)
    for by in (OURS, EXACT):
        yield (
            BATCHES,
            f"bytes read by bytes of rows, {by}",
            spread_of(results, BATCHES, by, read_per_byte),
        )
    yield BATCHES, "rows a second, by those not checked", times_of(results, BATCHES, UNCHECKED)
    for case in (COLD, BATCHES):
        for by in (FIO_POOL, POOL):
            words = f"CPU seconds a row, by {by}"
            yield case, words, times_of(results, case, by, cpu_seconds_per_million)
    yield DENSE, "requests a row", spread_of(results, DENSE, OURS, requests_per_row)
    yield DENSE, "time, by the better of a scan and rows alone", _by_better(results)
    yield DENSE, "time, by fio's that reads everything", _inverse(times_of(results, DENSE, FIO))
    for case in (CACHED, ORDERED):
        for ours_by in (OURS, FORESEEING):
            for by in EMULATED:
                found = _inverse(times_of(results, case, by, ours_by=ours_by))
                yield case, f"time, {ours_by} by {by}", found
        yield case, f"rows missed, {FORESEEING} by ginex", _missed_by(results, case)
    for ours_by in (OURS, CALLS):
        for by in (RESIDENT, REUSED):
            found = times_of(results, HITS, by, ours_by=ours_by)
            yield HITS, f"rows a second, {ours_by} by {by}", found
    curves = miss_curves(results)
    for by, other in ((ALL, BELADY), (SIEVE, REFERENCE)):
        if by in curves and other in curves:
            ratios = [missed / curves[other][part] for part, missed in curves[by].items()]
            yield POLICIES, f"misses, {by} by {other}", spread(ratios)


def _by_better(results: Results) -> Spread | None:
    """The time of a dense batch by the least time of any other way to have it."""
    ours = _by_round(results, DENSE, OURS, rate)
    others = [_by_round(results, DENSE, by, rate) for by in (EXACT, SCAN)]
    return spread(
        [
            max(best) / rows
            for index, rows in ours.items()
            if (best := [other[index] for other in others if index in other])
        ]
    )


def _missed_by(results: Results, case: str) -> Spread | None:
    """Misses with all batches known, relative to those of others that know them as well."""
    ours, theirs = (
        _by_round(results, case, by, lambda one: 1 - (hit_rate(one) or 0))
        for by in (FORESEEING, "ginex")
    )
    return spread([missed / theirs[index] for index, missed in ours.items() if index in theirs])


def _inverse(found: Spread | None) -> Spread | None:
    return found and found.inverse
