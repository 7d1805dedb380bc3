"""Whether one run is slower than another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from penstock.bench import likeness, ratios
from penstock.bench.results import ResultsError, UnlikeError

if TYPE_CHECKING:
    from penstock.bench.results import Results

MARGIN = 0.05
"""By how much slower is called slower: what machines differ by from hour to hour."""

CONFIDENCE = 0.99
"""For all cases together."""

ROUNDS_MIN = 3

Verdict = Literal["slower", "faster", "same", "unclear", "missing"]


class Compared(NamedTuple):
    """One case in two runs.

    Attributes:
        case: Its label.
        before: Median of the first run, GB/s.
        after: Median of the second run, GB/s.
        ratio: Of the second run to the first; it need not be that of the medians.
        low: Lower end of the interval that the ratio is in.
        high: Upper end.
        verdict: ``"slower"`` if the ratio is below 1 - margin and all of the interval below 1,
            ``"faster"`` if they are above 1 + margin and 1, ``"same"`` if all of the interval is
            within the margin, ``"unclear"`` if none of these, and ``"missing"`` where a run has too
            few measurements, or none of what the other has.
    """

    case: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: Verdict


def compare(
    before: Results,
    after: Results,
    *,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
    is_paired: bool = False,
) -> list[Compared]:
    """Compares the durable rates of all cases of two runs, of Penstock's own ways.

    The estimates are those of `penstock.bench.ratios`, at a confidence that holds for all cases
    together (Bonferroni). A case that only the first run has is missing: what was not measured must
    not pass. One that only the second has is new and has nothing to be held against.

    To ask that all of the interval is beyond the margin would take four times the rounds to notice
    what is twice the margin; that it excludes 1 is what keeps noise from being an alarm.

    Args:
        before: The run to hold the other against.
        after: The other.
        margin: What is too little to matter, as a part of the rate.
        confidence: That none of the intervals misses.
        is_paired: The runs were measured in turns, round by round: round is held against round, so
            what the disk does meanwhile touches both. A round in which one of them failed counts
            for neither.

    Raises:
        ResultsError: The two have no case in common.
        UnlikeError: They measured different things, or are to be paired and have not the same
            rounds.
        MissingDependencyError: SciPy is not installed.
    """
    if unlike := likeness.differences(before, after):
        raise UnlikeError(f"the runs measured different things: {'; '.join(unlike)}")
    wanted = _ours(before)
    if not any(pair in _ours(after) for pair in wanted):
        raise ResultsError("the two runs have no case in common")
    each = 1 - (1 - confidence) / len(wanted)
    return [
        _one(
            case if by == "penstock" else f"{case}, {by}",
            *_rates(before, after, case, by, is_paired),
            margin,
            each,
            is_paired,
        )
        for case, by in wanted
    ]


def _ours(results: Results) -> list[tuple[str, str]]:
    """The cases with the ways that Penstock was measured in: others are what it is held against."""
    return list(
        dict.fromkeys(
            (one.case, one.by) for one in results.measurements if one.by.startswith("penstock")
        )
    )


def _rates(
    before: Results, after: Results, case: str, by: str, is_paired: bool
) -> tuple[list[float], list[float]]:
    """The rates of a case in either run; paired, those of the rounds that neither failed in."""
    first, second = _by_round(before, case, by), _by_round(after, case, by)
    if not is_paired:
        return [rate for _, rate in first if rate], [rate for _, rate in second if rate]
    if [number for number, _ in first] != [number for number, _ in second]:
        raise UnlikeError(
            f"{case}: {len(first)} rounds before and {len(second)} after are not the same rounds, "
            "measured in turns"
        )
    both = [(one, two) for (_, one), (_, two) in zip(first, second, strict=True) if one and two]
    return [one for one, _ in both], [two for _, two in both]


def _by_round(results: Results, case: str, by: str) -> list[tuple[int, float]]:
    """The rate of each round, 0 where it failed."""
    return sorted(
        (one.round_index, 0.0 if one.error else one.durable_gb_per_second)
        for one in results.measurements
        if (one.case, one.by) == (case, by)
    )


def _one(
    case: str,
    before: list[float],
    after: list[float],
    margin: float,
    confidence: float,
    is_paired: bool,
) -> Compared:
    if min(len(before), len(after)) < ROUNDS_MIN:
        nothing = float("nan")
        return Compared(case, nothing, nothing, nothing, nothing, nothing, "missing")
    medians = float(np.median(before)), float(np.median(after))
    found = (ratios.of_rounds if is_paired else ratios.of_runs)(before, after, confidence)
    ratio, low, high = found
    verdict: Verdict = "unclear"
    if ratio < 1 - margin and high < 1:
        verdict = "slower"
    elif ratio > 1 + margin and low > 1:
        verdict = "faster"
    elif low >= 1 - margin and high <= 1 + margin:
        verdict = "same"
    return Compared(case, *medians, ratio, low, high, verdict)
