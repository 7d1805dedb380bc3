"""`on_signal`: a last save before the scheduler reclaims the machines.

The signal handler only records the signal and its time; everything else happens when training calls
`Preemption.at` after a step.

Many ranks have to stop after the same step: see `penstock.checkpoint.ranks.stopping`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import numbers
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from penstock.checkpoint.ranks.stopping import Stopping
from penstock.checkpoint.store import CheckpointStore
from penstock.checkpoint.training.training import Training
from penstock.errors import PenstockError, PenstockWarning, SaveCancelledError
from penstock.options import Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.checkpoint.ranks.group import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Whether training has to stop, and its last save; see `on_signal`.

    Attributes:
        signal: The number of the signal that this process received; None before.
    """

    def __init__(
        self,
        store: CheckpointStore,
        training: Any,
        signals: Iterable[int],
        grace_seconds: float,
    ) -> None:
        self.signal: int | None = None
        self._store = store
        # Reads the store's last save, and limits the waits of the next one.
        self._saver = store._saver
        self._training = training
        self._grace_seconds = grace_seconds
        self._deadline: float | None = None
        self._is_over = False
        self._is_closed = False
        self._ranks: Ranks | None = self._saver._ranks(to_save=False)
        self._stopping: Stopping | None = None
        self._previous: dict[int, Any] = {}
        if self._ranks is not None:
            self._stopping = Stopping(self._ranks)
        try:
            for number in signals:
                self._previous[number] = signal.signal(number, self._note)
        except (OSError, ValueError) as error:
            self.close()
            raise ValueError(f"signals: {number!r} cannot be caught: {error}") from None
        _open.add(self)

    def __repr__(self) -> str:
        return f"<Preemption: {'no signal' if self.signal is None else f'signal {self.signal}'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Restores the previous signal handlers."""
        _open.discard(self)
        if self._is_closed:
            return
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            # No other thread can set a handler: this handler restores the previous one when called.
            return
        for number in self._previous:
            # A handler that other code has set since stays.
            if signal.getsignal(number) == self._note:
                self._give_back(number)

    def at(self, step: int) -> bool:
        """Returns whether to stop after this step; every rank calls it after each step.

        If True, the step is saved before the return, as far as the grace period allows: if it is
        too short for another save, judged by the last one, only the running save is finished. An
        unsaved step causes a `PenstockWarning`.

        Args:
            step: The number of the step, as for `CheckpointStore.save`.

        Raises:
            PenstockError: The save failed. The next call tries again.
        """
        if self._is_over:
            return True
        if self._stopping is None:
            if self.signal is None:
                return False
        elif not self._stopping.is_here(step, self):
            return False
        self._stop(step)
        # Not set after an error: nothing is saved then, and there may be time for another save.
        self._is_over = True
        return True

    @property
    def remaining_seconds(self) -> float:
        """The remaining grace period, in seconds; the whole of it before a signal."""
        if self._deadline is None:
            return self._grace_seconds
        return max(self._deadline - time.monotonic(), 0.0)

    def begin_grace(self, elapsed_seconds: float) -> None:
        """Starts the grace period at another rank's signal."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_seconds - elapsed_seconds

    @property
    def elapsed_seconds(self) -> float:
        """Time since the signal, in seconds."""
        return self._grace_seconds - self.remaining_seconds

    def _give_back(self, number: int) -> None:
        """Restores the previous handler, skipping those of closed instances."""
        previous = self._previous[number]
        while (one := _owner(previous)) is not None and one._is_closed:
            previous = one._previous[number]
        # None means a handler that was not set by Python and cannot be restored.
        signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _note(self, number: int, frame: Any) -> None:
        if self._is_closed and signal.getsignal(number) == self._note:
            # Restored by an instance that was closed later: the signal must be passed on.
            self._give_back(number)
            signal.raise_signal(number)
            return
        if self.signal is None and not self._is_closed:
            self.begin_grace(0)
            self.signal = number
        previous = self._previous.get(number)
        # SIGINT's default handler raises, which would end the training before its save.
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _stop(self, step: int) -> None:
        """Saves the step, if there is enough time."""
        store = self._store
        with self._waiting_at_most(self.remaining_seconds):
            plan = self._agree(step)
            is_finished = self._finish_pending()
            if is_finished is None or (plan["is_saved"] and is_finished):
                return
            if not plan["has_time"]:
                self._warn(step, f"a save takes {plan['needed_seconds']:.1f} s")
                return
            state = self._training() if callable(self._training) else self._training
            pending = store.save_async(step, state)
            try:
                pending.result(self.remaining_seconds)
            except TimeoutError:
                pending.cancel()
                self._warn(step, "the save has not ended")

    def _agree(self, step: int) -> dict[str, Any]:
        """Returns the plan, which rank 0 decides."""

        def decide() -> dict[str, Any]:
            needed_seconds = self._saver._last.seconds
            return {
                "is_saved": self._saver._last.covers(step),
                "has_time": needed_seconds < self.remaining_seconds,
                "needed_seconds": needed_seconds,
            }

        if self._ranks is None or self._stopping is None:
            return decide()
        if not self._stopping.are_all_here:
            return {**decide(), "has_time": False}
        label = f"last save (step {step})"
        return self._ranks.agree(label, max(self.remaining_seconds, 1), decide)

    def _finish_pending(self) -> bool | None:
        """Waits for the running save; its failure does not prevent another save.

        Returns:
            Whether no save has failed; None if there is no time left.
        """
        pending = self._saver._last.pending
        if pending is None:
            return True
        try:
            pending.result(self.remaining_seconds)
        except TimeoutError:
            pending.cancel()
            self._warn(pending.step or 0, "its save has not ended")
            return None
        except PenstockError as error:
            # A cancelled save's error says so itself.
            is_reported = isinstance(error, SaveCancelledError)
            message = f"{error}" if is_reported else f"step {pending.step} is not saved: {error}"
            warnings.warn(message, PenstockWarning, stacklevel=4)
            return False
        return True

    @contextlib.contextmanager
    def _waiting_at_most(self, seconds: float) -> Iterator[None]:
        """Limits the saver's waits for other ranks inside the block."""
        saver = self._saver
        options = saver._options
        current = options or Options()
        limit = max(min(current.rank_timeout_seconds, int(seconds)), 1)
        saver._options = dataclasses.replace(current, rank_timeout_seconds=limit)
        try:
            yield
        finally:
            saver._options = options

    def _warn(self, step: int, reason: str) -> None:
        message = (
            f"step {step} is not saved: {reason}, and {self.remaining_seconds:.1f} s are left of "
            f"the {self._grace_seconds:g} s since the signal came; the newest complete step is "
            f"{self._store.latest()}"
        )
        warnings.warn(message, PenstockWarning, stacklevel=4)


def _owner(handler: Any) -> Preemption | None:
    """Returns the instance that a signal handler belongs to."""
    is_ours = getattr(handler, "__func__", None) is Preemption._note
    return handler.__self__ if is_ours else None


_open: set[Preemption] = set()


def on_signal(
    store: CheckpointStore,
    training: Any,
    *,
    signals: int | Iterable[int] = SIGNALS,
    grace_seconds: float = 30,
) -> Preemption:
    """Makes training stop with a last save when the scheduler sends a signal.

    The training loop calls `Preemption.at` after each step, and leaves when it returns True.
    Nothing else happens at a signal, so no step is lost or interrupted.

    Among many ranks, all call this, and `Preemption.at` after each step. A signal to one rank is
    enough; all stop after the same step, one or two steps after the signal. Without a signal, each
    step costs one look into the key-value store of `torch.distributed`, and no collective.

    An existing handler is called as well, and is restored when the block is left. Forked processes
    get it back at the fork.

    Args:
        store: The store of the last save.
        training: The state to save, as for `CheckpointStore.save`: a `Training`; or a function
            without arguments that returns a state.
        signals: One signal or several.
        grace_seconds: Seconds from the signal until the process is killed: 30 by default in
            torchrun and Slurm. ``docs/resuming.md`` has recipes.

    Raises:
        PenstockError: This is not the main thread, which receives signals.
        TypeError: An argument has the wrong type.
        ValueError: A signal cannot be caught, or the time is not positive and finite.

    Example:
        >>> import os, penstock, signal, tempfile
        >>> store = penstock.CheckpointStore(tempfile.mkdtemp())
        >>> training = penstock.Training(losses=[])
        >>> with penstock.on_signal(store, training) as preempted:
        ...     for step in range(1, 1000):
        ...         training.losses.append(1 / step)
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGTERM)
        ...         if preempted.at(step):
        ...             break
        >>> store.steps()
        [3]
    """
    if threading.current_thread() is not threading.main_thread():
        raise PenstockError(
            "on_signal: signals come to the main thread, and this is another one: call it there, "
            "and hand the result to whoever trains"
        )
    _check(store, training, grace_seconds)
    return Preemption(store, training, _numbers(signals), float(grace_seconds))


def _check(store: Any, training: Any, grace_seconds: Any) -> None:
    """Refuses early what would fail at the signal, and lose the last save."""
    if not isinstance(store, CheckpointStore):
        raise TypeError(
            f"store: a {type(store).__name__} is no CheckpointStore: give "
            "penstock.CheckpointStore(directory)"
        )
    kind = type(training).__name__
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(training, torch.nn.Module):
        raise TypeError(
            f"training: a {kind} is a model, which is no function that returns a state: give "
            "penstock.Training(model=model, …)"
        )
    if not isinstance(training, Training):
        if not callable(training):
            raise TypeError(
                f"training: a {kind} is neither a Training nor a function that returns a state: "
                "give penstock.Training(…), or lambda: state"
            )
        # The signature of some callables is unknown.
        with contextlib.suppress(ValueError):
            try:
                inspect.signature(training).bind()
            except TypeError as error:
                raise TypeError(
                    f"training: the function is called without arguments: {error}"
                ) from None
    if isinstance(grace_seconds, bool) or not isinstance(grace_seconds, numbers.Real):
        raise TypeError(f"grace_seconds={grace_seconds!r}: must be a number of seconds")
    if not 0 < float(grace_seconds) <= threading.TIMEOUT_MAX:
        raise ValueError(f"grace_seconds={grace_seconds!r}: must be positive and finite")


def _numbers(signals: Any) -> tuple[int, ...]:
    """Returns the numbers of signals, each once."""
    found = tuple(dict.fromkeys(signals)) if isinstance(signals, Iterable) else (signals,)
    for number in found:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(
                f"signals={signals!r}: {number!r} is no signal: give some, such as "
                "(signal.SIGTERM, signal.SIGUSR1)"
            )
    return found


class _Forking(threading.local):
    mask: set[int] | None = None
    """The signal mask of this thread before it began to fork."""


_forking = _Forking()


def _before_fork() -> None:
    if _open:
        # A signal that arrives before the child has its own handlers waits until then.
        numbers = {number for one in list(_open) for number in one._previous}
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork() -> None:
    mask, _forking.mask = _forking.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    # A signal to such a process is meant to end it.
    for preemption in list(_open):
        preemption.close()
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
