"""`LastSave`: what a run that is told to stop asks of its store."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from penstock.options import Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.saving.pending import PendingSave
    from penstock.checkpoint.store import CheckpointStore


class LastSave:
    """What the last save of a run asks of a store, beside what everybody may; for `Preemption`.

    Args:
        store: The store.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    @property
    def ranks(self) -> Ranks | None:
        """Who saves together; None for this process alone."""
        return self._store._ranks()

    @property
    def pending(self) -> PendingSave | None:
        """The last save in the background, unless somebody has waited for it here."""
        return self._store._turns.pending

    @property
    def needed_seconds(self) -> float:
        """How long the last save took; 0 where there was none."""
        return self._store._turns.last_seconds

    def covers(self, step: int) -> bool:
        """Whether a step is saved: last of all, or under way, or what was resumed from."""
        return self._store._turns.covers(step)

    @contextlib.contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Has the store wait for other ranks no longer than that."""
        store = self._store
        options = store._options
        current = options or Options()
        limit = max(min(current.rank_timeout_seconds, int(seconds)), 1)
        store._options = dataclasses.replace(current, rank_timeout_seconds=limit)
        try:
            yield
        finally:
            store._options = options
