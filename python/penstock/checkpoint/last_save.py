"""`LastSave`: the interface of a store for a run that has to stop."""

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
    """Operations of a store for the last save of a run; for `Preemption`.

    Args:
        store: The store.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that save together; None for this process alone."""
        return self._store._ranks()

    @property
    def pending(self) -> PendingSave | None:
        """The last background save, unless it was already waited for here."""
        return self._store._save_queue.pending

    @property
    def needed_seconds(self) -> float:
        """Duration of the last save; 0 if there was none."""
        return self._store._save_queue.last_seconds

    def covers(self, step: int) -> bool:
        """Whether a step is already saved, is being saved, or was the one resumed from."""
        return self._store._save_queue.covers(step)

    @contextlib.contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Limits the store's waits for other ranks inside the block."""
        store = self._store
        options = store._options
        current = options or Options()
        limit = max(min(current.rank_timeout_seconds, int(seconds)), 1)
        store._options = dataclasses.replace(current, rank_timeout_seconds=limit)
        try:
            yield
        finally:
            store._options = options
