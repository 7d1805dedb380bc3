"""Returns a loaded step to the caller of a store; all ranks restore it, or none."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.load import Loaded, Wanted, deliver
from penstock.checkpoint.steps.fallback import Descent
from penstock.common.events import tell
from penstock.common.tracing import call
from penstock.errors import PenstockError, PenstockWarning, RankError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.steps.reader import Reader
    from penstock.reports import LoadReport


def load(
    reader: Reader,
    ranks: Ranks | None,
    last: int | None,
    wanted: Wanted,
    *,
    where: str,
    fallback: bool,
    report: Callable[[LoadReport], object] | None,
    stacklevel: int,
) -> Any:
    """Loads a step of a store and issues its warnings.

    Args:
        reader: Finds and reads steps, for these ranks.
        ranks: The ranks that load; None for this process alone.
        last: The step; None for the newest.
        wanted: The request.
        where: The path for traces.
        fallback: Whether to return to the newest good step at or below ``last``.
        report: Called with the report at the end.
        stacklevel: The stack level of warnings, relative to this function's caller.
    """
    try:
        with call("stall", "load", where):
            loaded = _read(reader, last, wanted, fallback)
            told = len(loaded.warnings)
            state = _deliver(loaded, wanted, ranks, reader)
            reader.warnings += loaded.warnings[told:]
    except BaseException as error:
        reader.give_up(error)
        raise
    finally:
        for message in reader.warnings:
            warnings.warn(message, PenstockWarning, stacklevel=stacklevel)
    if skipped := len(loaded.report.skipped):
        tell(lambda observer: observer.passed_over(skipped))
    if report is not None:
        report(loaded.report)
    return state


def _read(reader: Reader, last: int | None, wanted: Wanted, fallback: bool) -> Loaded:
    if fallback:
        return Descent(reader).run(last, wanted)
    return reader.newest(wanted) if last is None else reader.step(last, wanted)


def _deliver(loaded: Loaded, wanted: Wanted, ranks: Ranks | None, reader: Reader) -> Any:
    """Returns the state to the caller; all ranks restore their `Training`, or all raise."""
    if ranks is None or not reader.is_awaited:
        return deliver(loaded, wanted, None if ranks is None else ranks.size)
    try:
        state = deliver(loaded, wanted, ranks.size)
    except Exception:
        with contextlib.suppress(PenstockError):
            reader.is_true_for_all(False)
        reader.is_awaited = False
        raise
    try:
        is_restored = reader.is_true_for_all(True)
    except PenstockError as error:
        error.add_note("this rank has restored its training: build it anew before it goes on")
        raise
    reader.is_awaited = False
    if not is_restored:
        raise RankError(
            f"{loaded.report.path}: another rank could not restore its training from this; "
            "what it raised says why; build the training anew before it goes on",
            rank=ranks.rank,
        )
    return state
