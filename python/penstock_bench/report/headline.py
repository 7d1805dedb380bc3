"""The result of a run in a sentence or two.

A ratio is there only where it is more than noise, with what it lies between. Of several others it
is the fastest that ours are held against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock_bench.peers.gather import OURS, POOL
from penstock_bench.peers.stream import RESIDENT
from penstock_bench.results.compare import CONFIDENCE, MARGIN, WHY, speedup, times
from penstock_bench.suites.checkpoint import figures
from penstock_bench.suites.gather import gathered
from penstock_bench.suites.gather.cases import FIO, FIO_POOL
from penstock_bench.suites.io.movers import DEEPSPEED
from penstock_bench.suites.stream import tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from penstock_bench.results.results import Results

    _Figures: TypeAlias = Mapping[str, Sequence[float]]

NOTE = f"In brackets: what a ratio lies between, at {CONFIDENCE:.0%} or more."

_CASES_NAMED_MAX = 3


def headlines(results: Results) -> list[str]:
    """The sentences of a run; none where there is nothing to say."""
    kinds: dict[str, Callable[[Results], Iterable[str]]] = {
        "checkpoint": _of_checkpoints,
        "io": _of_requests,
        "stream": _of_tokens,
        "gather": _of_rows,
    }
    return list(kinds[results.kind](results)) if results.kind in kinds else []


def _of_checkpoints(results: Results) -> Iterator[str]:
    asked: list[str] = results.settings.get("writers", [])
    emulated = results.settings.get("emulated", [])
    ours = [by for by in asked if by.startswith(OURS)]
    others = [by for by in asked if by not in ours]
    comparisons = 2 * max(1, len(ours))
    saving, loading = figures.rates(results, "save"), figures.rates(results, "load")
    waits = figures.waits(results)
    for by in ours:
        for what, rates in (("saves", saving), ("loads", loading)):
            if by in rates:
                rest = _those(rates, others)
                yield f"{by} {_sentence(what, rates[by], rest, comparisons, emulated)}"
        if by in figures.behind(results):
            yield _waiting(by, waits[by], _those(waits, others), comparisons)


def _of_requests(results: Results) -> Iterator[str]:
    names = {one.by for one in results.measurements}
    other = next((by for by in (FIO, DEEPSPEED) if by in names), None)
    if other is not None:
        yield from _against(results, other)
        return
    fastest: dict[str, tuple[float, str]] = {}
    for case, settings in results.cases.items():
        if rates := _rates(results, case, OURS):
            pattern = str(settings.get("pattern", "")).replace("_", " ")
            found = float(np.median(rates)), case
            fastest[pattern] = max(fastest.get(pattern, found), found)
    for pattern, (rate, case) in fastest.items():
        yield f"fastest {pattern}: {rate:.2f} GB/s ({case.removeprefix(f'{pattern}, ')})"


def _against(results: Results, other: str) -> Iterator[str]:
    """In how many cases ours is as fast as another one, and in which it is not."""
    rates = {case: [_rates(results, case, by) for by in (OURS, other)] for case in results.cases}
    compared = {case: pair for case, pair in rates.items() if all(pair)}
    found = {
        case: speedup(ours, theirs, len(compared)) for case, (ours, theirs) in compared.items()
    }
    told = {case: one for case, one in found.items() if one.verdict == "certain"}
    slower = {case: one for case, one in told.items() if one.ratio < 1 - MARGIN}
    faster = [case for case, one in told.items() if one.ratio > 1 + MARGIN]
    why = next(
        (WHY[one.verdict] for one in found.values() if one.verdict in ("few", "untested")), None
    )
    if why is not None:
        medians = [float(np.median(ours) / np.median(theirs)) for ours, theirs in compared.values()]
        yield (
            f"{OURS} has {min(medians):.2f} to {max(medians):.2f} of the rate of {other},"
            f" by medians ({why})"
        )
    elif found:
        counts = {"faster": len(faster), "slower": len(slower)}
        told_apart = " and ".join(f"{how} in {count}" for how, count in counts.items() if count)
        yield (
            f"of {len(found)} cases {OURS} is {told_apart or 'neither faster nor slower in any'}"
            f" than {other}, by more than {MARGIN:.0%} and noise"
        )
    worst = sorted(slower, key=lambda case: slower[case].ratio)
    for case in worst[:_CASES_NAMED_MAX]:
        yield f"slower: {case}, {times(slower[case].ratio)} times as fast {slower[case].interval}"
    if len(worst) > _CASES_NAMED_MAX:
        yield f"and in {len(worst) - _CASES_NAMED_MAX} more"


def _rates(results: Results, case: str, by: str) -> list[float]:
    return [one.durable_gb_per_second for one in results.of(case, by) if one.nbytes]


def _of_tokens(results: Results) -> Iterator[str]:
    rates = tokens.token_rates(results)
    others = [by for by in rates if not by.startswith(OURS) and by != RESIDENT]
    if OURS in rates:
        rest, unit = _those(rates, others), "tokens a second"
        yield f"{OURS} {_sentence('generates', rates[OURS], rest, 1, unit=unit)}"


def _of_rows(results: Results) -> Iterator[str]:
    cases = gathered.row_rates(results)
    not_others = (FIO, FIO_POOL, POOL)
    for case, rates in cases.items():
        others = [by for by in rates if not by.startswith(OURS) and by not in not_others]
        if OURS in rates:
            rest, unit = _those(rates, others), "rows a second"
            sentence = _sentence("gathers", rates[OURS], rest, len(cases), unit=unit)
            yield f"{case}: {OURS} {sentence}"


def _median(values: Sequence[float]) -> str:
    return gathered.figure(float(np.median(values)))


def _those(figures: _Figures, names: Sequence[str]) -> dict[str, Sequence[float]]:
    """The figures of these names, where they have any."""
    return {name: figures[name] for name in names if figures.get(name)}


def _sentence(
    what: str,
    ours: Sequence[float],
    others: _Figures,
    comparisons: int,
    emulated: Sequence[str] = (),
    unit: str = "GB/s",
) -> str:
    """A sentence on Penstock's rate beside that of the fastest other."""
    rate = f"{what} at {_median(ours)} {unit}"
    if not others:
        return rate
    name = max(others, key=lambda by: float(np.median(others[by])))
    theirs = others[name]
    shown = f"{name} (emulated)" if name in emulated else name
    if len(others) > 1:
        shown = f"the fastest other ({shown})"
    found = speedup(ours, theirs, comparisons)
    if found.verdict == "certain":
        return f"{what} {times(found.ratio)} times as fast as {shown} {found.interval}"
    return f"{rate}, {shown} at {_median(theirs)} ({WHY[found.verdict]})"


def _waiting(by: str, ours: Sequence[float], others: _Figures, comparisons: int) -> str:
    """How long training waits for a save in the background, and for that of another one."""
    waits = f"training waits {_median(ours)} s for a save of {by}"
    if not others:
        return waits
    name = min(others, key=lambda by: float(np.median(others[by])))
    shown = f"the fastest other ({name})" if len(others) > 1 else name
    found = speedup([1 / one for one in ours], [1 / one for one in others[name]], comparisons)
    if found.verdict == "certain":
        return f"{waits}, {times(found.ratio)} times as long for {shown} {found.interval}"
    return f"{waits}, {_median(others[name])} s for {shown} ({WHY[found.verdict]})"
