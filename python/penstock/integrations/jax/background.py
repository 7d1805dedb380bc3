"""`Background`: background saves of several processes, one after the other."""

from __future__ import annotations

import atexit
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.integrations.jax.processes import MultiProcessSave
    from penstock.reports import SaveReport


class PendingMultiProcessSave:
    """A background save of several processes.

    Attributes:
        path: The checkpoint's directory.
    """

    def __init__(self, save: MultiProcessSave, executor: ThreadPoolExecutor) -> None:
        self.path = save.path
        self._future: Future[SaveReport] = executor.submit(save.run)
        self.is_seen = False
        _live.add(self)
        self._future.add_done_callback(self._ended)

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
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

    def print_error(self) -> None:
        """Prints an error that was not raised to anybody."""
        error = self._future.exception()
        if error is not None:
            sys.stderr.write(f"penstock: {self.path} was not saved: {error}\n")

    def _ended(self, future: Future[SaveReport]) -> None:
        if future.exception() is None:
            _live.discard(self)


class Background:
    """Runs saves in the order of the calls, which is the same in all processes."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="penstock-jax")
        self._pending: PendingMultiProcessSave | None = None

    def begin(self, save: MultiProcessSave) -> PendingMultiProcessSave:
        """Begins a save; call `wait` before."""
        self._pending = PendingMultiProcessSave(save, self._executor)
        return self._pending

    def wait(self) -> None:
        """Waits for the save in progress.

        Raises:
            PenstockError: It failed, and its error was not raised before.
        """
        pending, self._pending = self._pending, None
        try:
            if pending is not None and not (pending.done() and pending.is_seen):
                pending.result()
        except BaseException:
            if pending is not None and not pending.done():
                # An interrupt: the save is still in progress.
                self._pending = pending
            raise


_live: set[PendingMultiProcessSave] = set()
"""Saves that run, or have failed without raising their error to anybody."""


@atexit.register
def _print_errors() -> None:
    # The executor's threads have ended by now.
    for pending in list(_live):
        pending.print_error()
