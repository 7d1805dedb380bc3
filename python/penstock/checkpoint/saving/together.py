"""A blocking save of many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.checkpoint.ranks.entering import abort_on_error
from penstock.checkpoint.saving.pending import PendingSave
from penstock.checkpoint.saving.save import Save
from penstock.common import events
from penstock.common.progress import shown
from penstock.common.tracing import span

if TYPE_CHECKING:
    from penstock.checkpoint.ranks.round import Round
    from penstock.checkpoint.saving.destination import Destination
    from penstock.common.progress import Progress
    from penstock.reports import SaveReport


_POLL_SECONDS = 0.05
"""Interval at which the waiting thread updates the progress and can take a Ctrl-C."""


@events.observed("save")
def save_multi_rank(
    destination: Destination,
    state: Any,
    save_round: Round,
    options: dict[str, Any],
    progress: bool | Progress,
) -> SaveReport:
    """Saves a state with other ranks, and waits for the commit."""
    with abort_on_error(save_round), shown(progress, "saving") as update:
        save = Save(destination, state, options=options, save_round=save_round, lazy=True)
        pending = PendingSave(save, lazy=False, after=_nothing, is_reported=True)
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


def _nothing() -> None:
    pass
