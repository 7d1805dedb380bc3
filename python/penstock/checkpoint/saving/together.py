"""A blocking save of many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.checkpoint.ranks.entering import or_give_up
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


_TURN_SECONDS = 0.05
"""Interval at which the waiting thread updates the progress and can take a Ctrl-C."""


@events.observed("save")
def save_together(
    destination: Destination,
    state: Any,
    together: Round,
    options: dict[str, Any],
    progress: bool | Progress,
) -> SaveReport:
    """Saves a state with other ranks, and waits for the commit."""
    with or_give_up(together), shown(progress, "saving") as update:
        save = Save(destination, state, options=options, together=together, lazy=True)
        pending = PendingSave(save, lazy=False, after=_nothing, is_told=True)
        try:
            with span("wait for save"):
                while not pending.wait_ended(_TURN_SECONDS):
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
