"""Runs work on several threads at the same time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HANG_SECONDS = 120


def on_threads(work: Callable[..., Any], arguments: Iterable[Any]) -> None:
    """Runs work on each argument in a thread of its own, all at the same time.

    Raises:
        BaseException: The first error of a thread.
    """
    raised: list[BaseException] = []

    def run(argument: Any) -> None:
        try:
            work(argument)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    if raised:
        raise raised[0]
