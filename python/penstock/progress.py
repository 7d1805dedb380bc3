"""A progress bar for long calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from penstock.errors import MissingDependencyError

Progress: TypeAlias = Callable[[int, int], object]
"""Called now and then with the bytes done and the bytes in all."""


@contextmanager
def shown(progress: bool | Progress, title: str) -> Iterator[Progress | None]:
    """What the native module calls while it works.

    Args:
        progress: True for a bar on standard error, False for nothing, or a function of one's own.
        title: Stands before the bar.
    """
    if progress is False or progress is None:
        yield None
    elif progress is True:
        with _bar(title) as update:
            yield update
    elif callable(progress):
        yield progress
    else:
        raise TypeError(f"progress={progress!r}: must be True, False or a function")


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    try:
        # A tenth of a second to import, and most calls show no bar.
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
