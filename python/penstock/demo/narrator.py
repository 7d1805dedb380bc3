"""`Narrator`: prints chapters, checked claims, evidence, and bars on a terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from penstock.common.console import console, size, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import RenderableType

    from penstock.demo.run import TrainingLog

CLAIM_INDENT = 3
EVIDENCE_INDENT = 6

LOSS_ROWS = 6
"""Evenly spaced rows in the table of losses, beside steps of interest."""


class ClaimError(Exception):
    """Something that the demo promises did not hold."""


class Narrator:
    """Prints to standard output, in 80 columns, also without a terminal."""

    def __init__(self) -> None:
        self._console = console()

    def chapter(self, title: str) -> None:
        """Begins a chapter."""
        self._console.print(Text(f"\n{title}", style="bold"))

    def claim(self, holds: bool, claim: str) -> None:
        """Prints a claim that holds.

        Raises:
            ClaimError: It does not hold.
        """
        if not holds:
            raise ClaimError(claim)
        line = Table.grid(padding=(0, 1))
        line.add_row(Text("ok", style="green"), Text(claim))
        self._print(line, CLAIM_INDENT)

    def say(self, text: str) -> None:
        """Prints a remark."""
        self._print(Text(text, style="dim"), EVIDENCE_INDENT)

    def files(self, files: Iterable[tuple[str, int]]) -> None:
        """Shows names and sizes of files."""
        listing = table("file", "size", numbers=("size",), folded="file")
        for name, nbytes in files:
            listing.add_row(name, size(nbytes))
        self._print(listing, EVIDENCE_INDENT)

    def losses(self, runs: dict[str, TrainingLog], interesting: Iterable[int]) -> None:
        """Shows losses of several runs side by side."""
        first = next(iter(runs.values()))
        even = {1 + (first.steps - 1) * row // (LOSS_ROWS - 1) for row in range(LOSS_ROWS)}
        rows = table("step", *runs, numbers=("step", *runs))
        for step in sorted(even.union(interesting)):
            cells = (run.loss(step) for run in runs.values())
            # Nine significant digits tell any two float32 apart.
            rows.add_row(str(step), *("" if loss is None else f"{loss:.9g}" for loss in cells))
        self._print(rows, EVIDENCE_INDENT)

    def error(self, error: Exception) -> None:
        """Shows an error as a user sees it."""
        kind = f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}"
        panel = Panel(
            Text(str(error)), title=kind, title_align="left", border_style="red", expand=False
        )
        self._print(panel, EVIDENCE_INDENT)

    def facts(self, facts: dict[str, str]) -> None:
        """Shows names and values in two columns."""
        rows = table("what", "value", folded="value")
        rows.show_header = False
        for name, value in facts.items():
            rows.add_row(name, value)
        self._print(rows, EVIDENCE_INDENT)

    @contextmanager
    def bar(self, label: str) -> Iterator[Callable[[TrainingLog], None]]:
        """A bar of training steps on a terminal, nothing elsewhere."""
        bar = Progress(
            TextColumn(" " * (CLAIM_INDENT - 1) + "{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        with bar:
            task = bar.add_task(label, total=None, loss="starting")

            def show(run: TrainingLog) -> None:
                if run.losses:
                    step = max(run.losses)
                    loss = f"loss {run.loss(step):.3f}"
                    bar.update(task, total=run.steps, completed=step, loss=loss)

            yield show

    def _print(self, what: RenderableType, indent: int) -> None:
        self._console.print(Padding(what, (0, 0, 0, indent), expand=False))
