"""`Stagers`: reuses the memory into which DCP copies the state for `async_save`.

For each ``async_save`` without one DCP makes a stager, and with it all of its memory; allocating
its pages takes most of the time that training waits. A stager that is used again copies into the
memory it has; so one is kept from save to save, and lent to one save at a time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

if TYPE_CHECKING:
    from concurrent.futures import Future

_PLAIN = StagingOptions(False, False, False, False)


class Stagers:
    """Replaces DCP's `DefaultStager` where DCP makes one itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: DefaultStager | None = None
        self._is_closed = False

    def lend(self, config: StagingOptions = _PLAIN) -> AsyncStager:
        """A stager, given back by its `close`."""
        if config != _PLAIN:
            return DefaultStager(config)
        with self._lock:
            stager, self._idle = self._idle, None
        return _Lent(self, stager or DefaultStager(config))

    def give_back(self, stager: DefaultStager) -> None:
        """Keeps a stager, unless another one is kept already."""
        with self._lock:
            if self._idle is None and not self._is_closed:
                self._idle = stager
                return
        stager.close()

    def close(self) -> None:
        """Releases the memory; stagers of saves in progress release theirs at the end."""
        with self._lock:
            stager, self._idle, self._is_closed = self._idle, None, True
        if stager is not None:
            stager.close()


class _Lent(AsyncStager):
    """A borrowed stager; `close` gives it back."""

    _synchronize_after_execute = False

    def __init__(self, stagers: Stagers, stager: DefaultStager) -> None:
        self._stagers = stagers
        self._stager: DefaultStager | None = stager

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        """Copies the state to the host."""
        stager = self._stager
        if stager is None:
            raise AssertionError("a stager is used that was closed")
        try:
            return stager.stage(state_dict)
        except AssertionError:
            # A tensor of the state has another size than at the last copy.
            stager.close()
            self._stager = stager = DefaultStager(_PLAIN)
            return stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Does nothing: `stage` returns when it is done."""

    def close(self) -> None:
        """Gives the stager back."""
        stager, self._stager = self._stager, None
        if stager is not None:
            self._stagers.give_back(stager)
