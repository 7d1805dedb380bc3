"""Figures of checkpoints that were saved and loaded in rounds, by writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock_bench.peers.checkpoint import SEALED
from penstock_bench.results.spread import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class Sealed(NamedTuple):
    """A writer sealed against the same one clear, within each round.

    Attributes:
        save: Rate of saves, sealed / clear.
        load: Rate of loads, sealed / clear; None where nothing was loaded.
        save_cpu: Processor time that a save takes more, s/GB.
        load_cpu: Processor time that a load takes more, s/GB.
        wait: What training waits for a save, sealed / clear.
    """

    save: Spread
    load: Spread | None
    save_cpu: Spread
    load_cpu: Spread | None
    wait: Spread


def sealed(results: Results) -> dict[str, Sealed]:
    """The costs of sealing, for each writer that was measured both ways."""
    found: dict[str, Sealed] = {}
    for by in writers(results):

        def compared(
            operation: str, value: Callable[[Measurement, Measurement], float], by: str = by
        ) -> Spread | None:
            clear = {one.round_index: one for one in _of(results, operation, by)}
            pairs = (
                (one, clear[one.round_index])
                for one in _of(results, operation, by + SEALED)
                if one.round_index in clear
            )
            values = [value(*pair) for pair in pairs]
            return spread(values) if values else None

        save, save_cpu = compared("save", _speed), compared("save", _more_cpu)
        wait = compared("save", lambda one, clear: one.waited_seconds / clear.waited_seconds)
        if save is not None and save_cpu is not None and wait is not None:
            load, load_cpu = compared("load", _speed), compared("load", _more_cpu)
            found[by] = Sealed(save, load, save_cpu, load_cpu, wait)
    return found


def _speed(one: Measurement, clear: Measurement) -> float:
    return one.durable_gb_per_second / clear.durable_gb_per_second


def _more_cpu(one: Measurement, clear: Measurement) -> float:
    return (one.cpu_seconds / one.nbytes - clear.cpu_seconds / clear.nbytes) * 1e9


def _of(results: Results, operation: str, by: str) -> Iterator[Measurement]:
    for case, settings in results.cases.items():
        if settings.get("operation") == operation:
            yield from (one for one in results.of(case, by) if one.nbytes)
