"""Signals that end a command early: cleans up after them."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FROM_OUTSIDE = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def tidy() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end a command as Ctrl-C does, so that it cleans up.

    CI jobs and launchers send SIGTERM, a closed terminal SIGHUP. Signals that are ignored, as under
    nohup, stay ignored.
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
    """Ignores these signals and Ctrl-C, so that they do not interrupt the cleanup."""
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
