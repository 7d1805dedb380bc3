"""Who is told that a save, a load or a check has ended, and how.

One observer at most, `penstock.metrics`. Without it a call looks at one variable, and a request at
none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar

from penstock.errors import PenstockWarning

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")

Call = Literal["save", "load", "verify", "scrub"]


class Observer(Protocol):
    """What wants to know of calls; its methods are called on any thread."""

    def ended(self, call: Call, outcome: Any, seconds: float) -> None:
        """A call ended.

        Args:
            call: What it was to do.
            outcome: The report, `Loaded` of a load, the `PendingSave` of a save that goes on in the
                background, None for one that was left out; or the exception.
            seconds: How long its caller has waited; 0 at the end of a save in the background.
        """

    def pending(self, change: int) -> None:
        """So many more saves are under way in the background, or fewer."""

    def mirrored(self, outcome: Any, seconds: float) -> None:
        """The copying of a step to a mirror ended.

        Args:
            outcome: The `MirrorReport`, or the exception.
            seconds: How long it took.
        """

    def passed_over(self, steps: int) -> None:
        """A load has gone back over so many steps that are not good."""


class _Thread(threading.local):
    is_told: bool = False
    """Whether a call of this thread is told of already: what it calls is part of it."""


_thread = _Thread()
_observer: Observer | None = None


def observe(observer: Observer | None) -> None:
    """Has an observer told of all calls from now on; None for nobody."""
    global _observer
    _observer = observer


def tell(say: Callable[[Observer], None]) -> bool:
    """Tells the observer, if there is one; whatever it raises is a warning.

    Returns:
        Whether it was told.
    """
    observer = _observer
    if observer is None:
        return False
    try:
        say(observer)
    except Exception as error:
        # A warning that is made an error must not undo what is done.
        with contextlib.suppress(Exception):
            warnings.warn(f"a call was not counted: {error!r}", PenstockWarning, stacklevel=3)
        return False
    return True


def told(call: Call, outcome: _T, seconds: float) -> _T:
    """Tells how a call ended, and returns that."""
    tell(lambda observer: observer.ended(call, outcome, seconds))
    return outcome


def observed(call: Call, *, ends: bool = True) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Has it told how a function ends.

    Not for public ones: doctest finds no examples in what is decorated.

    Args:
        call: What it does.
        ends: Whether its return ends the call; else only an exception does.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if _observer is None or _thread.is_told:
                return function(*args, **kwargs)
            began = time.perf_counter()
            _thread.is_told = True
            try:
                outcome = function(*args, **kwargs)
            except BaseException as error:
                told(call, error, time.perf_counter() - began)
                raise
            finally:
                _thread.is_told = False
            return told(call, outcome, time.perf_counter() - began) if ends else outcome

        return run

    return decorate
