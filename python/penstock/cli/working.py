"""Runs a command in a temporary directory, with a progress display."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from penstock.cli import endings
from penstock.common.console import console

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def worked(work: Path, run: Callable[[Callable[[str], object]], object], *, is_quiet: bool) -> None:
    """Runs a function in a new directory, which is removed however it ends.

    The function gets one that displays the next activity.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    display = console(stderr=True)
    hidden = is_quiet or not display.is_terminal
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    work.mkdir()
    try:
        with Progress(*columns, console=display, transient=True, disable=hidden) as bar:
            task = bar.add_task("", total=None)
            run(lambda text: bar.update(task, description=text))
    finally:
        with endings.undisturbed():
            shutil.rmtree(work, ignore_errors=True)
