"""Figures of checkpoints that were saved and loaded in rounds, by writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock_bench.results.results import Measurement, Results


def writers(results: Results) -> list[str]:
    """Who was asked to save, in that order."""
    asked = results.settings.get("writers")
    names = asked if isinstance(asked, list) else []
    return list(dict.fromkeys([*names, *(one.by for one in results.measurements)]))


def rates(results: Results, operation: str) -> dict[str, list[float]]:
    """GB/s of each round, with the sync; of a writer without a result there is nothing.

    The operation is ``"save"`` or ``"load"``.
    """
    return {
        by: found
        for by in writers(results)
        if (found := [one.durable_gb_per_second for one in _of(results, operation, by)])
    }


def waits(results: Results) -> dict[str, list[float]]:
    """Seconds that training waits for a save: the stall, or of who has none all of it."""
    return {
        by: found
        for by in writers(results)
        if (found := [one.waited_seconds for one in _of(results, "save", by)])
    }


def behind(results: Results) -> list[str]:
    """Who saves in the background."""
    return [
        by
        for by in writers(results)
        if any(one.stall_seconds is not None for one in _of(results, "save", by))
    ]


def _of(results: Results, operation: str, by: str) -> Iterator[Measurement]:
    for case, settings in results.cases.items():
        if settings.get("operation") == operation:
            yield from (one for one in results.of(case, by) if one.nbytes)
