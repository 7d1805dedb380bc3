"""`Background`: saves of several processes that go on while training does, one after the other."""

from __future__ import annotations

import atexit
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock import SaveReport
    from penstock.integrations.jax.processes import SaveTogether


class TogetherPending:
    """A save of several processes that goes on in the background.

    Attributes:
        path: Where to.
    """

    def __init__(self, save: SaveTogether, executor: ThreadPoolExecutor) -> None:
        self.path = save.path
        self._future: Future[SaveReport] = executor.submit(save.run)
        self.is_seen = False
        _live.add(self)
        self._future.add_done_callback(self._ended)

    def done(self) -> bool:
        """Whether it has come to an end, good or bad."""
        return self._future.done()

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Waits until the checkpoint is complete and on stable storage.

        Raises:
            PenstockError: The save failed.
            TimeoutError: It is still running.
        """
        try:
            return self._future.result(timeout_seconds)
        finally:
            if self.done():
                self.is_seen = True
                _live.discard(self)

    def tell(self) -> None:
        """Tells of an error that nobody has seen."""
        error = self._future.exception()
        if error is not None:
            sys.stderr.write(f"penstock: {self.path} was not saved: {error}\n")

    def _ended(self, future: Future[SaveReport]) -> None:
        if future.exception() is None:
            _live.discard(self)


class Background:
    """Who saves next, of several processes that all do so in the same order."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="penstock-jax")
        self._pending: TogetherPending | None = None

    def begin(self, save: SaveTogether) -> TogetherPending:
        """Begins a save, after `wait`."""
        self._pending = TogetherPending(save, self._executor)
        return self._pending

    def wait(self) -> None:
        """Waits for the save under way.

        Raises:
            PenstockError: Its error, if nobody has seen it.
        """
        pending, self._pending = self._pending, None
        try:
            if pending is not None and not (pending.done() and pending.is_seen):
                pending.result()
        except BaseException:
            if pending is not None and not pending.done():
                # A Ctrl-C: it is still under way.
                self._pending = pending
            raise


_live: set[TogetherPending] = set()
"""Saves that run, or have failed: somebody has to hear of them."""


@atexit.register
def _tell() -> None:
    # The executor's threads have ended by now.
    for pending in list(_live):
        pending.tell()
