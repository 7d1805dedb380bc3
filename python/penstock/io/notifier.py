"""How event loops hear of transfers that end.

By a descriptor, so that no thread of ours has to come into Python, least of all while the
interpreter ends.
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
    """What has an end: a transfer, a batch of rows."""

    def ring(self, bell: _native.Bell, key: int) -> None:
        """Has a bell rung then."""


class Bell:
    """Wakes the tasks of one event loop that wait for transfers."""

    def __init__(self) -> None:
        self._native = _native.Bell()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._keys = itertools.count()

    async def wait(self, transfer: Rings, cancel: Callable[[], None]) -> None:
        """Waits until a transfer has ended; ``cancel`` is called if the task is cancelled.

        Raises:
            PenstockError: This process is a fork of the one that moves the bytes.
        """
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


_bells: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bell] = weakref.WeakKeyDictionary()


def bell_of_loop() -> Bell:
    """That of the event loop that runs.

    Raises:
        RuntimeError: None runs.
    """
    loop = asyncio.get_running_loop()
    bell = _bells.get(loop)
    if bell is None:
        bell = _bells[loop] = Bell()
    return bell
