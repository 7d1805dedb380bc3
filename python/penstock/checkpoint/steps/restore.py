"""Returns a loaded step to the caller of a store; all ranks restore it, or none."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.load import Loaded, LoadRequest, restore_into
from penstock.checkpoint.steps.fallback import FallbackSearch
from penstock.common.events import notify
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
    request: LoadRequest,
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
        request: The request.
        where: The path for traces.
        fallback: Whether to return to the newest good step at or below ``last``.
        report: Called with the report at the end.
        stacklevel: The stack level of warnings, relative to this function's caller.
    """
    try:
        with call("stall", "load", where):
            loaded = _read(reader, last, request, fallback)
            told = len(loaded.warnings)
            state = _restore_on_all_ranks(loaded, request, ranks, reader)
            reader.warnings += loaded.warnings[told:]
    except BaseException as error:
        reader.abort(error)
        raise
    finally:
        for message in reader.warnings:
            warnings.warn(message, PenstockWarning, stacklevel=stacklevel)
    if skipped := len(loaded.report.skipped):
        notify(lambda observer: observer.passed_over(skipped))
    if report is not None:
        report(loaded.report)
    return state


def _read(reader: Reader, last: int | None, request: LoadRequest, fallback: bool) -> Loaded:
    if fallback:
        return FallbackSearch(reader).run(last, request)
    return reader.newest(request) if last is None else reader.step(last, request)


def _restore_on_all_ranks(
    loaded: Loaded, request: LoadRequest, ranks: Ranks | None, reader: Reader
) -> Any:
    """Returns the state to the caller; all ranks restore their `Training`, or all raise."""
    if ranks is None or not reader.is_awaited:
        return restore_into(loaded, request, None if ranks is None else ranks.size)
    try:
        state = restore_into(loaded, request, ranks.size)
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
