"""Wakes asyncio event loops when transfers end.

The native module signals a descriptor, so that no native thread has to enter Python, least of all
while the interpreter shuts down.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from typing import TYPE_CHECKING, Protocol

from penstock import _native

if TYPE_CHECKING:
    from collections.abc import Callable


class Rings(Protocol):
    """An operation that ends, such as a transfer or a batch of rows."""

    def ring(self, event_fd: _native.EventFd, key: int) -> None:
        """Signals the bell with this key when the operation ends."""


class Notifier:
    """Wakes the tasks of one event loop that wait for transfers."""

    def __init__(self) -> None:
        self._native = _native.EventFd()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._keys = itertools.count()

    async def wait(self, transfer: Rings, cancel: Callable[[], None]) -> None:
        """Waits until a transfer has ended; calls ``cancel`` if the task is cancelled."""
        loop = asyncio.get_running_loop()
        key = next(self._keys)
        future = loop.create_future()
        if not self._waiting:
            loop.add_reader(self._native.fileno(), self._answer)
        self._waiting[key] = future
        try:
            transfer.ring(self._native, key)
            await future
        except asyncio.CancelledError:
            cancel()
            raise
        finally:
            del self._waiting[key]
            if not self._waiting:
                loop.remove_reader(self._native.fileno())

    def _answer(self) -> None:
        for key in self._native.take():
            future = self._waiting.get(key)
            if future is not None and not future.done():
                future.set_result(None)


_bells: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Notifier] = weakref.WeakKeyDictionary()


def notifier_of_loop() -> Notifier:
    """Returns the bell of the running event loop."""
    loop = asyncio.get_running_loop()
    bell = _bells.get(loop)
    if bell is None:
        bell = _bells[loop] = Notifier()
    return bell
