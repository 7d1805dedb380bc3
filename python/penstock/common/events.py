"""Reports ended saves, loads and checks to an observer.

There is at most one observer, `penstock.metrics`. Without one, the cost is a look at one variable
per call, and nothing per request.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

from penstock.errors import PenstockWarning

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")

CallKind = Literal["save", "load", "verify", "scrub"]


class SaveInterval(NamedTuple):
    """The interval between saves that is in force, and its reason.

    Attributes:
        steps: Number of steps.
        reason: ``given``; ``first``, before anything is measured; ``best``, of least lost time;
            ``durable``, as a save takes longer than the best interval; ``bound``, the longest
            time allowed.
        seconds: Time of so many steps; None if not measured.
        cost_seconds: Training time that a save takes; None if not measured.
        failure_seconds: Mean time between failures; None if not needed.
    """

    steps: int
    reason: Literal["given", "first", "best", "durable", "bound"]
    seconds: float | None = None
    cost_seconds: float | None = None
    failure_seconds: float | None = None


class Observer(Protocol):
    """Receives events of calls; its methods are called on any thread."""

    def ended(self, call: CallKind, outcome: Any, seconds: float) -> None:
        """Handles the end of a call.

        Args:
            call: The kind of call.
            outcome: The report; `Loaded` for a load; the `PendingSave` of a save that continues in
                the background; None for a skipped save; or the exception.
            seconds: How long the caller waited; 0 at the end of a background save.
        """

    def pending(self, change: int) -> None:
        """Handles a change in the number of running background saves."""

    def mirrored(self, outcome: Any, seconds: float) -> None:
        """Handles the end of copying a step to a mirror."""

    def passed_over(self, steps: int) -> None:
        """Handles a load that skipped this many bad steps."""

    def paced(self, interval: SaveInterval) -> None:
        """Handles a new interval between saves, on the rank that measures."""


class _Thread(threading.local):
    is_observed: bool = False
    """Whether an outer call of this thread is observed, so that inner calls are not."""


_thread = _Thread()
_observer: Observer | None = None


def observe(observer: Observer | None) -> None:
    """Sets the observer of all later calls; None for no observer."""
    global _observer
    _observer = observer


def notify(say: Callable[[Observer], None]) -> bool:
    """Calls the observer, if there is one; its exceptions become warnings.

    Args:
        say: Called with the observer.

    Returns:
        Whether the observer was called successfully.
    """
    observer = _observer
    if observer is None:
        return False
    try:
        say(observer)
    except Exception as error:
        # A warning that is turned into an error must not undo a finished call.
        with contextlib.suppress(Exception):
            warnings.warn(f"a call was not counted: {error!r}", PenstockWarning, stacklevel=3)
        return False
    return True


def report_end(call: CallKind, outcome: _T, seconds: float) -> _T:
    """Reports the outcome of a call to the observer, and returns the outcome."""
    notify(lambda observer: observer.ended(call, outcome, seconds))
    return outcome


def observed(
    call: CallKind, *, ends: bool = True
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Returns a decorator that reports the outcome of a function to the observer.

    Not for public functions: doctest finds no examples in decorated ones. ``ends``: a return ends
    the call; otherwise only an exception does.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if _observer is None or _thread.is_observed:
                return function(*args, **kwargs)
            began = time.perf_counter()
            _thread.is_observed = True
            try:
                outcome = function(*args, **kwargs)
            except BaseException as error:
                report_end(call, error, time.perf_counter() - began)
                raise
            finally:
                _thread.is_observed = False
            return report_end(call, outcome, time.perf_counter() - began) if ends else outcome

        return run

    return decorate
