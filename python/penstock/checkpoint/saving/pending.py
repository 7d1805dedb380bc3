"""`PendingSave`: a save that goes on while the caller does."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

from penstock.checkpoint.saving.guard import hold_before_steps
from penstock.checkpoint.state.unstaged import unstaged
from penstock.common import events
from penstock.common.tracing import call, span
from penstock.errors import PenstockError, RankError, SaveCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.saving.save import Save
    from penstock.reports import SaveReport


class SaveProgress(NamedTuple):
    """How far a save has come.

    Attributes:
        bytes_done: Bytes on their way to storage, of this rank.
        bytes_total: Bytes to write.
    """

    bytes_done: int
    bytes_total: int


class PendingSave:
    """A save that goes on in the background; what `CheckpointStore.save_async` returns.

    The process does not exit before it is done, and what failed and was never asked for is
    reported on standard error then. Methods may be called from any thread.

    Attributes:
        path: The checkpoint's directory.
        step: The training step.
        stall_seconds: How long the call that returned this took: what training lost.
        is_told: Whether its end is that of a call of which observers are told.
        is_on_device: Whether a GPU had some of the state to copy when the call returned.

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
        self, save: Save, *, lazy: bool, after: Callable[[], None], is_told: bool = False
    ) -> None:
        self.path = save.destination.path
        self.step = save.destination.step
        self.stall_seconds = 0.0
        self._save: Save | None = save
        self._job = save.job
        # Also when all is copied: somebody has to say so before the state changes.
        self.is_on_device = save.job.is_on_device
        self._after = after
        self.is_told = is_told
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._is_seen = False
        self._is_cancelled = False
        self._done = threading.Event()
        self._pid = os.getpid()
        # A daemon would be stopped in the middle when the process exits.
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
            # It may run all the same, where it is a Ctrl-C that came.
            self.is_told = True
            save.cancel()
            save.give_up(error)
            raise

    def __repr__(self) -> str:
        what = "saved" if self.done() and self._error is None else "failed"
        return f"<PendingSave of {self.path!r}: {what if self.done() else 'running'}>"

    def stage(self) -> None:
        """Copies what is not copied yet, at the speed of memory.

        The state is free to change then.
        """
        self._check_process()
        try:
            with call("stall", "stage", self.path):
                self._job.stage()
                self._settle()
        except BaseException:
            # A Ctrl-C, or no memory: the save is given up, and this caller knows.
            self._see()
            raise
        unstaged.discard(self)

    def hold(self) -> None:
        """Sees to it that what an optimizer queues from now on comes after the copy.

        What devices have is waited for by their streams, and not here; the host's is copied.
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
        """Waits until the state is free to change: everything is copied, or the save has failed.

        Unlike `stage`, leaves the copying to the background.

        Args:
            timeout_seconds: For how long to wait; None for as long as it takes.

        Returns:
            Whether it is.
        """
        self._check_process()
        with call("stall", "wait", self.path):
            is_staged = self._job.wait_staged(timeout_seconds)
        if not is_staged:
            return False
        self._settle()
        unstaged.discard(self)
        return True

    def done(self) -> bool:
        """Whether it has come to an end, good or bad."""
        return self._done.is_set()

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Waits until the checkpoint is complete and on stable storage.

        Args:
            timeout_seconds: For how long to wait; None for as long as it takes.

        Returns:
            What was written and how.

        Raises:
            TimeoutError: It is still running; nothing is wrong yet.
            SaveCancelledError: It was cancelled.
            StateMismatchError: A tensor changed before a lazy save had copied it.
            PenstockError: Whatever else `penstock.save` raises.
        """
        self._check_process()
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
        """Waits for the end as `result` does, and returns the error, if there was one.

        Raises:
            TimeoutError: It is still running.
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
        """How far it has come."""
        return SaveProgress(*self._job.progress())

    def cancel(self) -> None:
        """Gives up, unless the commit has begun; `result` raises `SaveCancelledError` then.

        Of many ranks, the others learn of it and fail. Nobody else is told that it was given up.
        """
        self._check_process()
        self._see()
        self._is_cancelled = True
        save = self._save
        if save is not None:
            save.cancel()

    # What the store asks.

    @property
    def report(self) -> SaveReport | None:
        """What was written and how, once it is complete."""
        return self._report if self.done() else None

    @property
    def is_ours(self) -> bool:
        """Whether this process saves, and not the one that it is a fork of."""
        return self._pid == os.getpid()

    def wait_ended(self, timeout_seconds: float) -> bool:
        """Waits for the end, and no longer than that; whether it has come."""
        return self._done.wait(timeout_seconds)

    def wait_unseen(self) -> None:
        """Waits for the end, and raises the error that nobody has seen, if there is one."""
        with call("stall", "wait", self.path), span("wait for save"):
            self._done.wait()
        if not self._is_seen and self._error is not None:
            self._see()
            raise self._error

    @property
    def unseen(self) -> str | None:
        """What the user has to be told at the end, if anything."""
        if self._is_seen or not self.is_ours:
            return None
        if not self._done.is_set():
            return f"{self.path} was still being saved: it is lost unless it is listed"
        return None if self._error is None else f"{self.path} was not saved: {self._error}"

    def _settle(self) -> None:
        """All is copied: what changes from now on does no harm."""
        save = self._save
        if save is not None:
            save.settle()

    def _see(self) -> None:
        """Somebody knows what becomes of it: nobody else has to hear of that."""
        self._is_seen = True
        if self._done.is_set():
            _live.discard(self)

    def _run(self) -> None:
        # Who comes to observe while it runs must not hear of an end without a beginning.
        is_pending = not self.is_told and events.tell(lambda observer: observer.pending(1))
        try:
            save = self._save
            if save is None:
                raise AssertionError("a save runs once")
            with call("background", "save", self.path):
                self._report = save.run()
                # A warning that is made an error must not undo a commit.
                with contextlib.suppress(Exception), span("retire"):
                    self._after()
        except BaseException as error:
            if self._is_cancelled and isinstance(error, KeyboardInterrupt | RankError):
                # What ranks say may be that nobody knows whether it is saved.
                what = f": {error}" if isinstance(error, RankError) else " and is not saved"
                error = SaveCancelledError(f"{self.path} was cancelled{what}")
            # Of its frames, so that nothing of the state stays alive with it.
            self._error = error.with_traceback(None)
        finally:
            unstaged.discard(self)
            self._save = None
            # Before anybody is let go: who has the result finds it counted.
            if not self.is_told:
                events.told("save", self._report or self._error, 0)
            if is_pending:
                events.tell(lambda observer: observer.pending(-1))
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
"""Saves that run, or have failed: somebody has to hear of them."""


@atexit.register
def _report_unseen() -> None:
    for pending in list(_live):
        message = pending.unseen
        if message is not None:
            sys.stderr.write(f"penstock: {message}\n")


def _forget_in_child() -> None:
    # The threads are the parent's.
    _live.clear()
    unstaged.clear()


os.register_at_fork(after_in_child=_forget_in_child)
