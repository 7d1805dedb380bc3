"""`save_and_wait`: saves a state and returns once it is on stable storage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.saving.capture import capture
from penstock.checkpoint.saving.pending import PendingSave
from penstock.checkpoint.saving.save import Save
from penstock.common.progress import shown
from penstock.common.tracing import span

if TYPE_CHECKING:
    from penstock.checkpoint.ranks.round import Round
    from penstock.checkpoint.saving.destination import Destination
    from penstock.common.progress import Progress
    from penstock.reports import SaveReport

_POLL_SECONDS = 0.05
"""Interval at which the waiting thread updates the progress and can take a Ctrl-C."""


def save_and_wait(
    destination: Destination,
    state: Any,
    save_round: Round | None,
    options: dict[str, Any],
    progress: bool | Progress,
) -> SaveReport:
    """Saves a state, and waits for the commit.

    Args:
        destination: The destination.
        state: The state.
        save_round: The round in which many ranks save, which this call leaves unless it raises;
            None for this process alone.
        options: How bytes move, in the form that the native module takes.
        progress: True for a bar, or a function called with the bytes done and the total bytes.
    """
    if save_round is None:
        return _save_single(destination, state, options, progress)
    return _save_multi_rank(destination, state, save_round, options, progress)


def _save_single(
    destination: Destination, state: Any, options: dict[str, Any], progress: bool | Progress
) -> SaveReport:
    """Saves in one call of the native module, which copies no tensor before it is written."""
    flat, grouped, captured = capture(destination, state, began=time.perf_counter())
    key = destination.draw_key()
    destination.make_way()
    with shown(progress, "saving") as update:
        written = _native.save(
            destination.path,
            flat.tensors,
            flat.aliases,
            flat.tree,
            linked=flat.linked,
            grouped=grouped,
            step=destination.step,
            metadata=destination.metadata,
            overwrite=destination.overwrite,
            files=list(destination.files),
            index=captured.index,
            sealing=key,
            signing=None if destination.signing is None else destination.signing.native,
            previous=destination.former(),
            options=options,
            progress=update,
        )
    destination.committed(written["checkpoint_id"])
    written["fallbacks"] += captured.fallbacks
    return captured.report(written, total_bytes=written["bytes"])


def _save_multi_rank(
    destination: Destination,
    state: Any,
    save_round: Round,
    options: dict[str, Any],
    progress: bool | Progress,
) -> SaveReport:
    """Saves in a thread, as the messages of ranks need Python while this one takes signals."""
    with shown(progress, "saving") as update:
        save = Save(destination, state, options=options, save_round=save_round, lazy=True)
        pending = PendingSave(save, lazy=False, is_reported=True)
        try:
            with span("wait for save"):
                while not pending.wait_ended(_POLL_SECONDS):
                    if update is not None:
                        update(*pending.progress())
            if update is not None:
                update(*pending.progress())
        except BaseException:
            pending.cancel()
            pending.exception()
            raise
    return pending.result()
