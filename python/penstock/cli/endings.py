"""How a command that leaves nothing behind is ended early."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def tidy() -> Iterator[None]:
    """Has whatever ends a command do what Ctrl-C does.

    CI jobs and launchers send SIGTERM, a terminal that is lost SIGHUP. What was told to be ignored,
    as nohup does, still is.
    """
    with _handled(
        {
            one: signal.default_int_handler
            for one in _FROM_OUTSIDE
            if signal.getsignal(one) == signal.SIG_DFL
        }
    ):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Has nothing of that break off what tidies up."""
    with _handled(dict.fromkeys((signal.SIGINT, *_FROM_OUTSIDE), signal.SIG_IGN)):
        yield


@contextmanager
def _handled(
    handlers: dict[signal.Signals, Callable[..., object] | signal.Handlers],
) -> Iterator[None]:
    before = {one: signal.signal(one, handler) for one, handler in handlers.items()}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
