"""`Stagers`: lends the memory into which the state is copied for `async_save`.

For each ``async_save`` without one DCP makes a stager, and with it all of its memory. A stager that
is used again copies into the memory it has; so one is kept from save to save, and lent to one save
at a time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager

from penstock.integrations.dcp.host_stager import PLAIN, HostStager

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import StagingOptions


class Stagers:
    """Replaces DCP's `DefaultStager` where DCP makes one itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: HostStager | None = None
        self._is_closed = False

    def lend(self, config: StagingOptions = PLAIN) -> AsyncStager:
        """A stager, given back by its `close`."""
        if config != PLAIN:
            return DefaultStager(config)
        with self._lock:
            stager, self._idle = self._idle, None
        return _Lent(self, stager or HostStager())

    def give_back(self, stager: HostStager) -> None:
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

    def __init__(self, stagers: Stagers, stager: HostStager) -> None:
        self._stagers = stagers
        self._stager: HostStager | None = stager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies the state to the host."""
        if self._stager is None:
            raise AssertionError("a stager is used that was closed")
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Does nothing: `stage` returns when it is done."""

    def close(self) -> None:
        """Gives the stager back."""
        stager, self._stager = self._stager, None
        if stager is not None:
            self._stagers.give_back(stager)
