"""`PendingSave`: a save that runs in the background."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

from penstock.checkpoint.saving.guard import hold_before_steps
from penstock.checkpoint.state.unstaged import unstaged
from penstock.common import events
from penstock.common.tracing import call, span
from penstock.errors import PenstockError, RankError, SaveCancelledError, SaveInProgressError
from penstock.reports import SaveProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.saving.save import Save
    from penstock.reports import SaveReport


class PendingSave:
    """A save that runs in the background; returned by `CheckpointStore.save_async`.

    The process does not exit before the save has ended, and then reports on standard error a
    failure that was never raised. Methods may be called from any thread.

    Attributes:
        path: The checkpoint's directory.
        step: The training step.
        stall_seconds: Duration of the call that returned this object, which training lost.
        is_reported: Whether the end belongs to a call that is reported to observers.
        is_on_device: Whether a GPU still had to copy some of the state when the call returned.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> store = penstock.CheckpointStore(tempfile.mkdtemp())
        >>> w = np.ones(3)
        >>> pending = store.save_async(1, {"w": w})
        >>> w += 1
        >>> pending.result().step
        1
        >>> store.load()["w"]
        array([1., 1., 1.])
    """

    def __init__(
        self,
        save: Save,
        *,
        lazy: bool,
        after: Callable[[SaveReport], None] | None = None,
        is_reported: bool = False,
    ) -> None:
        self.path = save.destination.path
        self.step = save.destination.step
        self.stall_seconds = 0.0
        self._save: Save | None = save
        self._job = save.job
        # True even after the copy: the streams must be told before the state changes.
        self.is_on_device = save.job.is_on_device
        self._after = after
        self.is_reported = is_reported
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._is_seen = False
        self._is_cancelled = False
        self._done = threading.Event()
        self._pid = os.getpid()
        # A daemon thread would be stopped in the middle when the process exits.
        self._thread = threading.Thread(target=self._run, name="penstock-save", daemon=False)
        if lazy:
            unstaged.add(self)
            if self.is_on_device:
                hold_before_steps()
        _live.add(self)
        try:
            self._thread.start()
        except BaseException as error:
            _live.discard(self)
            unstaged.discard(self)
            # After a Ctrl-C during the start, the thread may run all the same.
            self.is_reported = True
            save.cancel()
            save.abort(error)
            raise

    def __repr__(self) -> str:
        what = "saved" if self.done() and self._error is None else "failed"
        return f"<PendingSave of {self.path!r}: {what if self.done() else 'running'}>"

    def stage(self) -> None:
        """Copies the tensors that are not copied yet, at the speed of memory.

        Afterwards the state may be changed.
        """
        self._check_process()
        try:
            with call("stall", "stage", self.path):
                self._job.stage()
                self._end_watch()
        except BaseException:
            # After a Ctrl-C, or out of memory: the save is cancelled, and this caller gets the
            # error.
            self._see()
            raise
        unstaged.discard(self)

    def hold(self) -> None:
        """Orders later work on device tensors after the copy, as in front of an optimizer's step.

        The current streams of devices wait for the copies, but this call does not; host tensors are
        copied here.
        """
        save = self._save
        if save is None or not self._job.is_on_device:
            self.stage()
            return
        self._check_process()
        try:
            with call("stall", "hold", self.path):
                save.hold()
        except BaseException:
            self._see()
            raise
        unstaged.discard(self)

    def wait_staged(self, timeout_seconds: float | None = None) -> bool:
        """Waits until the state may be changed: everything is copied, or the save has failed.

        Unlike `stage`, leaves the copying to the background.

        Args:
            timeout_seconds: Longest wait, in seconds; None for no limit.

        Returns:
            Whether the state may be changed.
        """
        self._check_process()
        with call("stall", "wait", self.path):
            is_staged = self._job.wait_staged(timeout_seconds)
        if not is_staged:
            return False
        self._end_watch()
        unstaged.discard(self)
        return True

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._done.is_set()

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Waits until the checkpoint is complete and on stable storage.

        Args:
            timeout_seconds: Longest wait, in seconds; None for no limit.

        Returns:
            A report of the bytes written and of how they were written.

        Raises:
            TimeoutError: The save is still running; this is no failure.
            SaveInProgressError: The save itself called the function that waits for it.
            SaveCancelledError: The save was cancelled.
            StateMismatchError: A tensor changed before a lazy save had copied it.
            PenstockError: Any other error of `penstock.save`.
        """
        self._check_process()
        self.check_not_within()
        with call("stall", "wait", self.path):
            is_done = self._done.wait(timeout_seconds)
        if not is_done:
            raise TimeoutError(f"{self.path} is still being saved")
        self._thread.join()
        self._see()
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise AssertionError("a save that has ended has a report or an error")
        return self._report

    def exception(self, timeout_seconds: float | None = None) -> BaseException | None:
        """Waits for the end as `result` does, and returns the error; None after a success.

        Raises:
            TimeoutError: The save is still running.
            SaveInProgressError: The save itself called the function that waits for it.
        """
        try:
            self.result(timeout_seconds)
        except TimeoutError:
            if not self.done():
                raise
            return self._error
        except BaseException:
            if self._error is None:
                raise
            return self._error
        return None

    def progress(self) -> SaveProgress:
        """Returns the progress of the save."""
        return SaveProgress(*self._job.progress())

    def cancel(self) -> None:
        """Cancels the save unless its commit has begun; `result` then raises `SaveCancelledError`.

        Among many ranks, the save fails on the others too. A cancelled save is not reported as a
        failure at exit.
        """
        self._check_process()
        self._see()
        self._is_cancelled = True
        save = self._save
        if save is not None:
            save.cancel()

    # Queries of the store.

    @property
    def report(self) -> SaveReport | None:
        """The report of a completed save; None before, or after a failure."""
        return self._report if self.done() else None

    @property
    def is_ours(self) -> bool:
        """Whether this process runs the save, and is not a fork of the one that does."""
        return self._pid == os.getpid()

    def wait_ended(self, timeout_seconds: float) -> bool:
        """Waits for the end, with a time limit; returns whether the save has ended."""
        return self._done.wait(timeout_seconds)

    def check_not_within(self) -> None:
        """Refuses to wait in a function that the save calls: the save ends after that function.

        Raises:
            SaveInProgressError: The saving thread waits for itself.
        """
        if threading.current_thread() is self._thread and not self.done():
            raise SaveInProgressError(
                f"{self.path} cannot be waited for in a function that its own save calls, such as "
                "keep=, after= or an observer's: the save ends after the function returns; wait in "
                "another thread",
                path=self.path,
            )

    def wait_unseen(self) -> None:
        """Waits for the end, and raises the save's error if it has not been raised yet."""
        with call("stall", "wait", self.path), span("wait for save"):
            self._done.wait()
        if not self._is_seen and self._error is not None:
            self._see()
            raise self._error

    @property
    def unseen(self) -> str | None:
        """The message for the user at the end of the process, if any."""
        if self._is_seen or not self.is_ours:
            return None
        if not self._done.is_set():
            return f"{self.path} was still being saved: it is lost unless it is listed"
        return None if self._error is None else f"{self.path} was not saved: {self._error}"

    def _end_watch(self) -> None:
        """Ends the watch for changes: everything is copied."""
        save = self._save
        if save is not None:
            save.check_unchanged()

    def _see(self) -> None:
        """Marks the outcome as known, so that it needs no report at exit."""
        self._is_seen = True
        if self._done.is_set():
            _live.discard(self)

    def _run(self) -> None:
        # An observer registered during the save must not receive an end without a beginning.
        is_pending = not self.is_reported and events.notify(lambda observer: observer.pending(1))
        try:
            save = self._save
            if save is None:
                raise AssertionError("a save runs once")
            with call("background", "save", self.path):
                self._report = save.run()
                if self._after is not None:
                    # Its errors do not undo the commit.
                    with contextlib.suppress(Exception), span("retire"):
                        self._after(self._report)
        except BaseException as error:
            if self._is_cancelled and isinstance(error, KeyboardInterrupt | RankError):
                # The ranks' error may say that the outcome is unknown.
                what = f": {error}" if isinstance(error, RankError) else " and is not saved"
                error = SaveCancelledError(f"{self.path} was cancelled{what}")
            # Without its frames, which would keep the state alive.
            self._error = error.with_traceback(None)
        finally:
            unstaged.discard(self)
            self._save = None
            # Before the waiting threads are woken: whoever has the result finds it counted.
            if not self.is_reported:
                events.report_end("save", self._report or self._error, 0)
            if is_pending:
                events.notify(lambda observer: observer.pending(-1))
            self._done.set()
            if self._error is None or self._is_seen:
                _live.discard(self)

    def _check_process(self) -> None:
        if not self.is_ours:
            raise PenstockError(
                f"{self.path} is saved by process {self._pid}, of which this one is a fork: wait "
                "for it there"
            )


_live: set[PendingSave] = set()
"""Saves that run, or whose failure has not been reported yet."""


@atexit.register
def _report_unseen() -> None:
    for pending in list(_live):
        message = pending.unseen
        if message is not None:
            sys.stderr.write(f"penstock: {message}\n")


def _forget_in_child() -> None:
    # The threads belong to the parent.
    _live.clear()
    unstaged.clear()


os.register_at_fork(after_in_child=_forget_in_child)
