"""`Follower`: copies the steps of a store to its mirror, in the background.

A single thread copies; saves only notify it. It may stop at any moment with the store or the
process, because its successor continues where it stopped: the mirror itself records its contents.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock import _native
from penstock.checkpoint.loading.dcp_files import drop_mark
from penstock.checkpoint.mirroring.copy_step import explaining_conflict, identity_there
from penstock.common import events
from penstock.common.tracing import call
from penstock.errors import (
    CannotSealError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    PartialCheckpointError,
    PenstockError,
)
from penstock.reports import MirrorReport, MirrorStatus
from penstock.tensors.arguments import to_native

if TYPE_CHECKING:
    from penstock.checkpoint.mirroring.mirror import Mirror
    from penstock.common.events import Observer
    from penstock.options import Options

_NICE = 19
"""Copies are not urgent: they yield to training."""

_PAUSE_SECONDS = 1.0
_PAUSE_SECONDS_MAX = 300.0
"""Pause after the first failure, and the longest pause; each is twice the one before."""

_LOOK_SECONDS = 0.5
"""Interval between two checks of a waiting caller."""

_EXIT_SECONDS = 1.0
"""Longest wait for the thread at the end of the process."""

_TOLD_MAX = 5
"""Largest number of steps named at the end of the process."""

_REFUSALS = (
    CannotSealError,
    CorruptCheckpointError,
    CheckpointExistsError,
    FormatVersionError,
    PartialCheckpointError,
)
"""Errors that recur until the step or its copy changes."""

_GONE = (CheckpointNotFoundError, IncompleteCheckpointError)
"""Errors of a step that was deleted after it was listed."""


_Signatures: TypeAlias = "tuple[tuple[str, int, int, int], ...]"
"""Name, inode, size and time of each file of a step's signatures."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The reason why a step was not copied.

    Attributes:
        checkpoint_id: Identity of the local step; None if it could not be read.
        reason: The error's message.
        is_there: Whether the cause is at the mirror. It may be resolved there at any time, so the
            step is tried again.
    """

    checkpoint_id: str | None
    reason: str
    is_there: bool


class Follower:
    """Copies the steps of a store, newest first."""

    def __init__(self, mirror: Mirror, store: _native.Store, options: Options | None) -> None:
        self.mirror = mirror
        self._store = store
        self._options = to_native(options)
        self._forget()
        _followers.add(self)

    @property
    def remote(self) -> _native.Store:
        """The mirror, with the bucket's current access settings."""
        return _native.Store(self.mirror.url)

    def _forget(self) -> None:
        """Resets all state, also in a forked child, which has no threads."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._news = 0
        """Number of notifications for the thread."""
        self._mirrored: dict[int, str] = {}
        self._signatures: dict[int, _Signatures] = {}
        """The signatures of each step when it was mirrored."""
        self._refused: dict[int, _Refusal] = {}
        self._again: set[int] = set()
        """Refused steps that are tried once more."""
        self._job: tuple[int, _native.MirrorJob] | None = None
        self._failures = 0
        self._last_error: Exception | None = None
        self._unreported: str | None = None
        """An error that has not been reported to the user."""

    def follow(self) -> None:
        """Notifies the thread to look for steps to copy."""
        with self._changed:
            self._is_closed = False
            self._news += 1
            self._failures = 0
            self._again.update(step for step, one in self._refused.items() if one.is_there)
            if self._thread is None:
                # A daemon thread: the end of the process does not wait for a running copy.
                self._thread = threading.Thread(
                    target=self._run, name="penstock-mirror", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None) -> bool:
        """Waits until all due steps are mirrored or refused; returns whether they are."""
        self.follow()
        ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._waiting():
            left = _LOOK_SECONDS if ends is None else ends - time.monotonic()
            if left <= 0 or self._is_closed:
                return False
            with self._changed:
                # Other changes of the directory cause no notification.
                self._changed.wait(min(left, _LOOK_SECONDS))
        return True

    def wait_for(self, step: int, timeout_seconds: float | None = None) -> None:
        """Waits until a step is mirrored."""
        checkpoint_id = self._store.identity(step)

        def is_over() -> bool:
            is_there = self._mirrored.get(step) == checkpoint_id
            is_refused = self._is_refused(step, checkpoint_id)
            return is_there or self._failures > 0 or is_refused or self._is_closed

        self.follow()
        with self._changed:
            self._changed.wait_for(is_over, timeout_seconds)
            if self._mirrored.get(step) == checkpoint_id:
                return
            error = self._last_error
        what = f"step {step} is saved here, but not at {self.mirror.url} yet"
        if error is None:
            raise PenstockError(f"{what}: the store was closed")
        error.add_note(what)
        raise error

    def status(self) -> MirrorStatus:
        """Returns the status of the copying."""
        waiting = tuple(self._waiting())
        with self._changed:
            step, (sent_bytes, total_bytes) = None, (0, 0)
            if self._job is not None:
                step, job = self._job
                sent_bytes, total_bytes = job.bytes()
            return MirrorStatus(
                url=self.mirror.url,
                mirrored=tuple(sorted(self._mirrored)),
                waiting=waiting,
                refused={step: one.reason for step, one in sorted(self._refused.items())},
                step=step,
                sent_bytes=sent_bytes,
                total_bytes=total_bytes,
                failures=self._failures,
                last_error=None if self._last_error is None else str(self._last_error),
            )

    def close(self, timeout_seconds: float | None = None) -> None:
        """Stops the thread; its successor sends the remaining steps."""
        with self._changed:
            thread = self._thread
            if thread is None:
                return
            self._is_closed = True
            if self._job is not None:
                self._job[1].cancel()
            self._changed.notify_all()
        if thread is not threading.current_thread():
            thread.join(timeout_seconds)

    def leave(self) -> None:
        """Stops at the end of the process: from now on the thread does not take the GIL."""
        with self._changed:
            if self._thread is None:
                return
            if self._job is not None:
                self._job[1].leave()
        self.close(_EXIT_SECONDS)
        if waiting := self._waiting():
            steps = ", ".join(map(str, waiting[-_TOLD_MAX:]))
            sys.stderr.write(
                f"penstock: not at {self.mirror.url} yet: step {steps}; the next process that "
                "saves to this store, or `penstock mirror`, goes on with that\n"
            )

    def take_unreported(self) -> str | None:
        """Returns an error that has not been reported to the user yet, once."""
        with self._changed:
            unreported, self._unreported = self._unreported, None
        return unreported

    def _waiting(self) -> list[int]:
        """Returns complete local steps, due and neither mirrored nor refused, oldest first."""
        found = []
        for step in self._store.committed():
            if not self.mirror.is_due(step):
                continue
            checkpoint_id = self._store.identity(step)
            if checkpoint_id is None or self._is_mirrored(step, checkpoint_id):
                continue
            if not self._is_refused(step, checkpoint_id):
                found.append(step)
        return found

    def _is_mirrored(self, step: int, checkpoint_id: str) -> bool:
        """Whether a step is at the mirror, with the signatures that it has now."""
        if self._mirrored.get(step) != checkpoint_id:
            return False
        now = self._signatures_of(step, checkpoint_id)
        return now == self._signatures.get(step, ())

    def _signatures_of(self, step: int, checkpoint_id: str) -> _Signatures:
        """The files of a step's signatures, by which a later change of them shows."""
        if self.mirror.sealing is not None:
            # A sealed copy is another checkpoint, to which they do not belong.
            return ()
        found = []
        for name in _native.signature_files(checkpoint_id):
            with contextlib.suppress(OSError):
                status = os.stat(os.path.join(self._store.step_path(step), name))
                found.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _is_refused(self, step: int, checkpoint_id: str | None) -> bool:
        refusal = self._refused.get(step)
        is_this = refusal is not None and refusal.checkpoint_id == checkpoint_id
        return is_this and step not in self._again

    def _run(self) -> None:
        while (step := self._next()) is not None:
            try:
                with call("background", "mirror", self._store.step_path(step)):
                    if self._send(step):
                        self._trim()
            except _GONE:
                continue
            except Exception as error:
                self._fail(step, error)

    def _next(self) -> int | None:
        """Waits for a step to send, newest first; returns None at the end."""
        while True:
            with self._changed:
                news = self._news
                if self._is_closed:
                    self._thread = None
                    return None
            try:
                waiting = self._waiting()
            except Exception as error:
                self._fail(None, error)
                continue
            if waiting:
                return waiting[-1]
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(functools.partial(self._has_news_since, news))

    def _has_news_since(self, news: int) -> bool:
        """Whether the thread has to look for steps, or to end."""
        return self._is_closed or self._news != news

    def _send(self, step: int) -> bool:
        """Copies a step; returns whether it is mirrored, False if the store was closed."""
        job = _native.MirrorJob()
        with self._changed:
            if self._is_closed:
                return False
            self._job = (step, job)
        sealing = self.mirror.sealing
        # Before they are sent: one that is made meanwhile is sent in the next pass.
        before = self._store.identity(step)
        signatures = () if before is None else self._signatures_of(step, before)
        began = time.perf_counter()
        try:
            with explaining_conflict(self.remote.step_path(step)):
                fields = job.run(
                    self._store.step_path(step),
                    self.remote.step_path(step),
                    sealing=None if sealing is None else sealing.wrap_new(),
                    bytes_per_second=self.mirror.bytes_per_second,
                    connections=self.mirror.connections,
                    nice=_NICE,
                    options=self._options,
                )
            report = MirrorReport(**fields)
        except KeyboardInterrupt:
            # The copy was cancelled because the store was closed.
            return False
        except PenstockError as error:
            seconds = time.perf_counter() - began
            events.notify(functools.partial(_notify, error, seconds))
            raise
        finally:
            with self._changed:
                self._job = None
        events.notify(functools.partial(_notify, report, report.seconds))
        with self._changed:
            self._failures = 0
            self._mark_complete(step, report.checkpoint_id)
            self._signatures[step] = signatures
        return True

    def _mark_complete(self, step: int, checkpoint_id: str) -> None:
        """Records that a step is complete at the mirror; the caller holds the lock."""
        self._mirrored[step] = checkpoint_id
        self._refused.pop(step, None)
        self._again.discard(step)
        self._changed.notify_all()

    def _fail(self, step: int | None, error: Exception) -> None:
        """Records an error, and waits before the next attempt."""
        with self._changed:
            known = None if step is None else self._refused.get(step)
            is_known = known is not None and known.reason == str(error)
            if not is_known and str(error) != str(self._last_error):
                self._unreported = str(error)
            self._last_error = error.with_traceback(None)
            if step is not None and isinstance(error, _REFUSALS):
                self._refuse(step, error)
                return
            self._failures += 1
            self._changed.notify_all()
            pause = min(_PAUSE_SECONDS * 2 ** (self._failures - 1), _PAUSE_SECONDS_MAX)
            self._changed.wait_for(functools.partial(self._has_news_since, self._news), pause)

    def _refuse(self, step: int, error: PenstockError) -> None:
        """Excludes a step from automatic attempts; the caller holds the lock."""
        checkpoint_id = None
        with contextlib.suppress(PenstockError):
            checkpoint_id = self._store.identity(step)
        is_there = getattr(error, "path", None) != self._store.step_path(step)
        self._refused[step] = _Refusal(checkpoint_id, str(error), is_there)
        self._again.discard(step)
        self._changed.notify_all()

    def _trim(self) -> None:
        """Deletes surplus local steps whose copies are complete at the mirror."""
        keep_local = self.mirror.keep_local
        if keep_local is None:
            return
        for step in self._store.committed()[:-keep_local]:
            checkpoint_id = self._store.identity(step)
            if checkpoint_id is None or not self.mirror.is_due(step):
                continue
            # Checked at the mirror just now, whoever wrote it.
            if identity_there(self.remote, step, self.mirror) != checkpoint_id:
                continue
            if self.remote.state(step) != "complete":
                continue
            if self._signatures_of(step, checkpoint_id) != self._signatures.get(step, ()):
                # They would be lost with the step; the next pass sends them.
                continue
            with self._changed:
                self._mark_complete(step, checkpoint_id)
            for retired in self._store.retire([(step, checkpoint_id)]):
                drop_mark(self._store.step_path(retired))


def _notify(outcome: MirrorReport | PenstockError, seconds: float, observer: Observer) -> None:
    observer.mirrored(outcome, seconds)


_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for follower in list(_followers):
        # Errors are ignored, as the process is ending.
        with contextlib.suppress(Exception):
            follower.leave()


def _forget_in_child() -> None:
    # The threads belong to the parent, and one of them may have held a lock.
    for follower in list(_followers):
        follower._forget()


os.register_at_fork(after_in_child=_forget_in_child)
