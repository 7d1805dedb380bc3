"""How far a benchmark is, on standard error while it lasts."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def shown(total: int, text: str = "") -> Iterator[Callable[[str, int], None]]:
    """A bar that is gone when all is done.

    Args:
        total: How many operations there are.
        text: What is done first.

    Yields:
        What to call with what is being done, or nothing if that is as before, and with how many
        more operations are behind.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda text, done: bar.update(task, advance=done, description=text or None)
