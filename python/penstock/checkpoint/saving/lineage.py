"""`Lineage`: ids of the checkpoints that a store knows to be older than its next one."""

from __future__ import annotations

import contextlib

from penstock import _native
from penstock.errors import PenstockError


class Lineage:
    """Ids of the checkpoints that a store knows to be older than its next one, newest first.

    Ids are random, so a checkpoint that lists one was written after that one began. The list comes
    from memory: from what this store has saved, and before its first save from what it has loaded
    and checked. Only a store that has done neither takes it from the newest step in the storage,
    where anybody may have written it.

    Args:
        native: The store.
    """

    def __init__(self, native: _native.Store) -> None:
        self._native = native
        self._former: list[str] | None = None
        self._loaded: int | None = None
        self._has_saved = False

    def former(self) -> list[str]:
        """Returns the ids for the next save, at most `PREVIOUS_MAX`."""
        if self._former is None:
            self._former = self._stored()
        return self._former

    def saved(self, checkpoint_id: str) -> None:
        """Records a checkpoint that was committed."""
        self._former = [checkpoint_id, *self.former()][: _native.PREVIOUS_MAX]
        self._has_saved = True

    def loaded(self, step: int | None, checkpoint_id: str, previous: tuple[str, ...]) -> None:
        """Records a checkpoint that was loaded.

        The newest one counts, as a run may also look at older ones; and none does once the store
        has saved.
        """
        rank = -1 if step is None else step
        if self._has_saved or (self._loaded is not None and rank < self._loaded):
            return
        self._loaded = rank
        self._former = [checkpoint_id, *previous][: _native.PREVIOUS_MAX]

    def _stored(self) -> list[str]:
        """Returns the ids that the newest complete step gives."""
        # A save does not fail because an older step cannot be read.
        with contextlib.suppress(PenstockError):
            newest = self._native.newest_complete()
            found = None if newest is None else self._native.lineage(newest)
            if found is not None:
                checkpoint_id, previous = found
                return [checkpoint_id, *previous][: _native.PREVIOUS_MAX]
        return []
