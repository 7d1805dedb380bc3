"""Figures of text that was generated in rounds: rates, and their upper bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock_bench.peers.stream import OURS, RESIDENT

if TYPE_CHECKING:
    from penstock_bench.results.results import Measurement, Results

FIO = "fio"
CASE = "tokens"


def token_rates(results: Results) -> dict[str, list[float]]:
    """Tokens a second in each round, by who generated."""
    found: dict[str, list[float]] = {}
    for one in results.measurements:
        if one.token_seconds and not one.error:
            found.setdefault(one.by, []).append(1 / one.token_seconds)
    return found


def of_roofline(results: Results) -> list[float]:
    """Penstock's speed relative to the upper bound, in each round that has both."""
    ours = {one.round_index: one for one in results.of(CASE, OURS)}
    found = []
    for index, least in _roofline_seconds(results).items():
        seconds = ours[index].token_seconds
        if seconds:
            found.append(least / seconds)
    return found


def token_roofline(results: Results) -> float | None:
    """Tokens a second that were possible: the median of the rounds."""
    found = list(_roofline_seconds(results).values())
    return 1 / float(np.median(found)) if found else None


def first_of_pass(results: Results) -> list[float]:
    """In each round, our first token as so many passes that read all weights, or compute."""
    weights = results.settings.get("weight_bytes")
    found = []
    for one, fio, resident in _together(results):
        if one.first_token_seconds and resident.first_token_seconds and weights:
            least = max(weights / fio / 1e9, resident.first_token_seconds)
            found.append(one.first_token_seconds / least)
    return found


def times_of(results: Results, by: str) -> list[float]:
    """How many times the tokens of another one we have, in each round that both have."""
    theirs = {one.round_index: one.token_seconds for one in results.of(CASE, by)}
    ours = {one.round_index: one.token_seconds for one in results.of(CASE, OURS)}
    return [
        seconds / own for index, seconds in theirs.items() if seconds and (own := ours.get(index))
    ]


def cpu_seconds_per_gb(results: Results, by: str) -> list[float]:
    """Processor time beyond that of the model in memory, of each GB read, round by round."""
    resident = {one.round_index: one.cpu_seconds for one in results.of(CASE, RESIDENT)}
    return [
        (one.cpu_seconds - resident[one.round_index]) / one.nbytes * 1e9
        for one in results.of(CASE, by)
        if one.nbytes and one.round_index in resident
    ]


def _roofline_seconds(results: Results) -> dict[int, float]:
    """The least seconds of a token by round: of reading its part of a pass, or of computing it."""
    found = {}
    for ours, fio, resident in _together(results):
        if ours.pass_bytes is not None and resident.token_seconds:
            read = ours.pass_bytes / fio / 1e9 / (ours.pass_tokens or 1)
            found[ours.round_index] = max(read, resident.token_seconds)
    return found


def _together(results: Results) -> list[tuple[Measurement, float, Measurement]]:
    """Ours, GB/s of fio before and after, and the model in memory, of rounds that have them all."""
    ours, resident = (
        {one.round_index: one for one in results.of(CASE, name)} for name in (OURS, RESIDENT)
    )
    fio: dict[int, list[float]] = {}
    for one in results.of(CASE, FIO):
        fio.setdefault(one.round_index, []).append(one.gb_per_second)
    return [
        (one, float(np.mean(fio[index])), resident[index])
        for index, one in ours.items()
        if index in fio and index in resident
    ]
