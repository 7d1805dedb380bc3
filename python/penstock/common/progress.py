"""Progress reporting of long calls."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from penstock.errors import MissingDependencyError

Progress: TypeAlias = Callable[[int, int], object]
"""A function called from time to time with the bytes done and the total bytes."""

_EXIT_SECONDS_MAX = 1.0
"""Longest wait at exit for a running progress function."""

_PAUSE_SECONDS = 0.002
"""Pause between two checks of whether it has returned."""


@contextmanager
def shown(progress: bool | Progress, title: str) -> Iterator[Progress | None]:
    """Yields the function that the native module calls to report progress; None for no report.

    Args:
        progress: True for a bar on standard error, False for nothing, or a function.
        title: The text before the bar.
    """
    if progress is False or progress is None:
        yield None
    elif progress is True:
        with _bar(title) as update:
            yield _ending_in_time(update)
    elif callable(progress):
        yield _ending_in_time(progress)
    else:
        raise TypeError(f"progress={progress!r}: must be True, False or a function")


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    try:
        # Importing rich takes a tenth of a second, and most calls show no bar.
        from rich import progress as bars
        from rich.console import Console
    except ImportError as error:
        raise MissingDependencyError(
            "progress=True needs rich, which is not installed: pip install rich", name="rich"
        ) from error
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task(title, total=None)
        yield lambda done, total: display.update(task, completed=done, total=total)


def _ending_in_time(update: Progress) -> Progress:
    """Wraps a progress function for a daemon thread, so that it is not called at exit.

    The interpreter does not wait for daemon threads. CPython before 3.14 ends such a thread when it
    next wants the GIL; inside a function that the native module has called, that aborts the
    process.
    """
    if not threading.current_thread().daemon:
        return update

    def update_unless_ending(done: int, total: int) -> object:
        # The order matters: the exit function sees this thread in `_running`, or the thread sees
        # `_is_ending`.
        _running.add(threading.get_ident())
        try:
            return None if _is_ending.is_set() else update(done, total)
        finally:
            _running.discard(threading.get_ident())

    return update_unless_ending


_running: set[int] = set()
"""Daemon threads that are inside a progress function."""

_is_ending = threading.Event()


@atexit.register
def _wait_for_running() -> None:
    _is_ending.set()
    deadline = time.monotonic() + _EXIT_SECONDS_MAX
    while _running and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
