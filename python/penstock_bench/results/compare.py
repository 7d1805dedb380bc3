"""Whether one run is slower than another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from penstock.errors import MissingDependencyError
from penstock_bench.results import ratios
from penstock_bench.results import results as results_module
from penstock_bench.results.results import ResultsError, UnlikeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock_bench.results.results import Results

MARGIN = 0.05
"""By how much slower is called slower: what machines differ by from hour to hour."""

CONFIDENCE = 0.99
"""For all cases together."""

Verdict = Literal["slower", "faster", "same", "unclear", "failing", "few", "missing"]


class Compared(NamedTuple):
    """One case in two runs; NaN where there is nothing.

    Attributes:
        case: Its label.
        verdict: ``"slower"`` if the ratio is below 1 - margin, all of the interval below 1, and
            that is not chance, ``"faster"`` if likewise above, ``"same"`` if all of the interval is
            within the margin, ``"unclear"`` if none of these. ``"failing"`` where the second run
            failed more often than the first, ``"few"`` where the rounds are too few to tell chance
            from anything, ``"missing"`` where a run has none.
        before: Median of the first run, GB/s.
        after: Median of the second run, GB/s.
        ratio: Of the second run to the first; it need not be that of the medians.
        low: Lower end of the interval that the ratio is in.
        high: Upper end.
        reason: Why there is none of the first four, if so.
    """

    case: str
    verdict: Verdict
    before: float = math.nan
    after: float = math.nan
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str | None = None

    @property
    def passes(self) -> bool:
        """Whether this is no reason to refuse the second run; what is not known is one."""
        return self.verdict in ("faster", "same", "unclear")


def compare(
    before: Results,
    after: Results,
    *,
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
    is_paired: bool = False,
) -> list[Compared]:
    """Compares the durable rates of all cases of two runs, of Penstock's own ways.

    The estimates are those of `penstock_bench.results.ratios`, at a confidence that holds for all
    cases together (Bonferroni). A case that only the first run has is missing: what was not
    measured must not pass. One that only the second has is new and has nothing to be held against.

    To ask that all of the interval is beyond the margin would take four times the rounds to notice
    what is twice the margin; that it excludes 1, and a rank test chance, is what keeps noise from
    being an alarm.

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
            rounds, or they are those of a search.
        MissingDependencyError: SciPy is not installed.
    """
    if unlike := results_module.differences(before, after):
        raise UnlikeError(f"the runs measured different things: {'; '.join(unlike)}")
    if before.kind == "tune":
        raise UnlikeError("a search for options measures what it likes: it cannot be compared")
    files = [one.settings.get("files") for one in (before, after)]
    if is_paired and files[0] != files[1]:
        raise UnlikeError("rounds of directories are paired by name: name their files alike")
    wanted = _ours(before)
    if not any(pair in _ours(after) for pair in wanted):
        raise ResultsError("the two runs have no case in common")
    each = 1 - (1 - confidence) / len(wanted)
    judge = _Judge(margin, each, is_paired)
    return [
        judge.compared(
            case if by == "penstock" else f"{case}, {by}",
            _rounds(before, case, by),
            _rounds(after, case, by),
        )
        for case, by in wanted
    ]


def rounds_needed(cases: int) -> int:
    """How many rounds of each run it takes to compare so many cases at all."""
    return ratios.rounds_min(1 - (1 - CONFIDENCE) / cases, is_paired=False)


def _ours(results: Results) -> list[tuple[str, str]]:
    """The cases with the ways that Penstock was measured in: others are what it is held against."""
    return list(
        dict.fromkeys(
            (one.case, one.by) for one in results.measurements if one.by.startswith("penstock")
        )
    )


class _Round(NamedTuple):
    number: int
    rate: float
    error: str | None


def _rounds(results: Results, case: str, by: str) -> list[_Round]:
    found = [one for one in results.measurements if (one.case, one.by) == (case, by)]
    return [
        _Round(one.round_index, 0.0 if one.error else one.durable_gb_per_second, one.error)
        for one in sorted(found, key=lambda one: one.round_index)
    ]


@dataclass
class _Judge:
    margin: float
    confidence: float
    is_paired: bool

    def compared(self, case: str, before: list[_Round], after: list[_Round]) -> Compared:
        """The verdict on a case."""
        if not after:
            return Compared(case, "missing", reason="the second run has not measured it")
        failures = [one.error for one in after if one.error]
        if len(failures) > sum(1 for one in before if one.error):
            reason = f"{len(failures)} of {len(after)} rounds failed: {failures[0]}"
            return Compared(case, "failing", reason=reason)
        rates = self._rates(case, before, after)
        if not all(rates):
            return Compared(case, "missing", reason="no round could be measured")
        medians = float(np.median(rates[0])), float(np.median(rates[1]))
        rounds_min = ratios.rounds_min(self.confidence, is_paired=self.is_paired)
        if min(map(len, rates)) < rounds_min:
            taken = " and ".join(str(len(run)) for run in rates)
            reason = (
                f"{taken} rounds are too few to tell a change from chance: measure both with "
                f"--rounds {rounds_min} or more"
            )
            return Compared(case, "few", *medians, medians[1] / medians[0], reason=reason)
        estimate = ratios.of_rounds if self.is_paired else ratios.of_runs
        found = estimate(*rates, self.confidence)
        interval = found.ratio, found.low, found.high
        return Compared(case, self._verdict(found), *medians, *interval)

    def _rates(
        self, case: str, before: list[_Round], after: list[_Round]
    ) -> tuple[list[float], list[float]]:
        """The rates of either run; paired, those of the rounds that neither failed in."""
        if not self.is_paired:
            return [one.rate for one in before if one.rate], [one.rate for one in after if one.rate]
        if [one.number for one in before] != [one.number for one in after]:
            raise UnlikeError(
                f"{case}: {len(before)} rounds before and {len(after)} after are not the same "
                "rounds, measured in turns"
            )
        pairs = [pair for pair in zip(before, after, strict=True) if pair[0].rate and pair[1].rate]
        return [one.rate for one, _ in pairs], [two.rate for _, two in pairs]

    def _verdict(self, found: ratios.Ratio) -> Verdict:
        is_chance = found.chance > 1 - self.confidence
        if found.ratio < 1 - self.margin and found.high < 1 and not is_chance:
            return "slower"
        if found.ratio > 1 + self.margin and found.low > 1 and not is_chance:
            return "faster"
        if found.low >= 1 - self.margin and found.high <= 1 + self.margin:
            return "same"
        return "unclear"


SpeedupVerdict = Literal["certain", "noise", "few", "untested"]

WHY = {
    "noise": "which may be noise",
    "few": "too few rounds to tell from noise",
    "untested": "whether that is noise takes SciPy: pip install 'penstock[bench]'",
}
"""Of verdicts that give no ratio."""


class Speedup(NamedTuple):
    """How many times as fast one contender is as another one.

    Attributes:
        ratio: How many times as fast, or as long.
        low: What that is at least.
        high: What it is at most.
        verdict: ``"certain"``, ``"noise"`` (it may as well be 1), ``"few"`` (rounds) or
            ``"untested"`` (SciPy is not installed).
    """

    ratio: float
    low: float
    high: float
    verdict: SpeedupVerdict

    @property
    def interval(self) -> str:
        """The ends of the ratio's interval."""
        return f"[{times(self.low)}, {times(self.high)}]"


def speedup(ours: Sequence[float], theirs: Sequence[float], comparisons: int) -> Speedup:
    """All rounds of ours by all rounds of another one.

    Args:
        ours: What each round of ours has: a rate, or the inverse of a time.
        theirs: And of the other one.
        comparisons: How many such are made of one run: what is said of all of them holds together.
    """
    confidence = 1 - (1 - CONFIDENCE) / comparisons
    ratio = float(np.median(ours) / np.median(theirs))
    if min(len(ours), len(theirs)) < ratios.rounds_min(confidence, is_paired=False):
        return Speedup(ratio, ratio, ratio, "few")
    try:
        found = ratios.of_runs(theirs, ours, confidence)
    except MissingDependencyError:
        return Speedup(ratio, ratio, ratio, "untested")
    is_certain = found.chance <= 1 - confidence and not found.low <= 1 <= found.high
    return Speedup(found.ratio, found.low, found.high, "certain" if is_certain else "noise")


def times(ratio: float) -> str:
    """A ratio with the digits that count."""
    return f"{ratio:,.0f}" if ratio >= 20 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"
