"""The harness of every suite: its options, its rounds, its child processes and its files.

A suite is a function that measures and returns its tables; `suite` makes a command of it.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock_bench.harness import machine, process
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.options import (
    QUICK_ROUNDS,
    ROOT,
    ROUNDS,
    common,
    names_option,
    output_directory,
    show,
)
from penstock_bench.harness.running import rotated
from penstock_bench.results.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from rich.console import RenderableType

T = TypeVar("T")


class Steps:
    """A progress bar on standard error, from ``with`` to the end of the block."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        console = Console(stderr=True)
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bar.add_task("", total=0)
        self._total = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Shows what is being done."""
        self._bar.update(self._task, description=text)

    def each(self, items: Iterable[T], label: Callable[[T], str] = str) -> Iterator[T]:
        """The items one by one, each of them a step of the bar."""
        steps = list(items)
        self._total += len(steps)
        self._bar.update(self._task, total=self._total)
        for item in steps:
            self.say(label(item))
            yield item
            self._bar.advance(self._task)


@dataclass
class Run:
    """One run of a suite.

    Attributes:
        names: The contenders that were chosen, in the order of the suite.
        rounds: How often each is measured.
        is_quick: Whether sizes are small: it is only tried whether everything runs.
        directory: A directory on the disk to measure.
        timeout_seconds: For one child process.
        results: Everything that was measured.
        results_path: The file that has the results after each turn of a round.
    """

    names: tuple[str, ...]
    rounds: int
    is_quick: bool
    directory: Path
    timeout_seconds: float
    results: Samples[Any]
    results_path: Path
    _place: Path | None = None
    _steps: Steps = field(default_factory=Steps)
    _given_up: dict[object, str] = field(default_factory=dict)

    @property
    def place(self) -> Path:
        """The directory of this run alone, inside of `at_work`."""
        if self._place is None:
            raise AssertionError("there is no directory outside of at_work")
        return self._place

    @contextmanager
    def at_work(self, needed_bytes: float, **settings: Any) -> Iterator[Path]:
        """Makes the directory of the run, and removes it with everything in it.

        The settings are added to those of the results.
        """
        self.results.settings |= settings
        with workplace(self.directory, needed_bytes) as self._place, self._steps:
            yield self._place

    def say(self, text: str) -> None:
        """Shows what is being done."""
        self._steps.say(text)

    def each(self, items: Iterable[T], label: Callable[[T], str] = str) -> Iterator[T]:
        """The items one by one, each of them a step of the progress bar."""
        return self._steps.each(items, label)

    def in_rounds(
        self, turns: Sequence[T], label: Callable[[T], str] = str, last: Sequence[T] = ()
    ) -> Iterator[tuple[int, T]]:
        """The turns of all rounds with the number of the round, from 0.

        Each round begins with another turn, so that no turn always follows the same one. The
        results are written after each turn, so that a run which is stopped leaves those it has.

        Args:
            turns: What is measured in a round.
            label: A turn in words.
            last: Turns that end each round.
        """
        every = [
            (index, turn)
            for index in range(self.rounds)
            for turn in (*rotated(turns, index), *last)
        ]
        for turn in self.each(every, lambda one: f"round {one[0] + 1}: {label(one[1])}"):
            yield turn
            self.results.write(self.results_path)

    def child(
        self, function: Callable[[Any], dict[str, Any]], task: object, cell: object = None
    ) -> dict[str, Any]:
        """Calls a function in a process of its own.

        Args:
            function: What to call; returns what can be JSON.
            task: Its argument.
            cell: A name for the measurement: once it has failed it is not tried again.

        Returns:
            The result of the function, or ``{"error": …}``.
        """
        return self.children(function, [task], cell)[0]

    def children(
        self, function: Callable[[Any], dict[str, Any]], tasks: Sequence[object], cell: object
    ) -> list[dict[str, Any]]:
        """Calls a function for each task, in processes that run at the same time; see `child`."""
        if cell in self._given_up:
            return [{"error": self._given_up[cell]}]
        found = process.run(function, tasks, self.place, self.timeout_seconds)
        error = next((one["error"] for one in found if one.get("error")), None)
        if cell is not None and error is not None:
            self._given_up[cell] = error
        return found


@dataclass(frozen=True)
class Report:
    """The output of a suite.

    Attributes:
        tables: Its tables, for the terminal and the text file.
        derived: Statistics for the JSON file.
        draw: Draws its plot into a file.
    """

    tables: RenderableType
    derived: dict[str, Any]
    draw: Callable[[Path], None] | None = None


def suite(
    name: str,
    rows: Iterable[str],
    who: str,
    *,
    preload: Sequence[str],
    rounds_usual: int = ROUNDS,
    timeout_seconds: float = 600.0,
    default: str = "all",
) -> Callable[[Callable[..., Report]], click.Command]:
    """Makes a command of a function that measures; its options are those of the function and ours.

    Args:
        name: The name of the files of results.
        rows: The contenders, for ``--only``.
        who: What these are, for its help.
        preload: Modules that processes find imported.
        rounds_usual: Rounds unless ``--rounds`` or ``--quick`` says otherwise.
        timeout_seconds: For one child process, unless ``--timeout`` says otherwise.
        default: What ``--only`` is without, for its help.
    """
    known = tuple(rows)

    def command(measure: Callable[..., Report]) -> click.Command:
        @functools.wraps(measure)
        def main(
            *,
            names: tuple[str, ...],
            rounds: int | None,
            quick: bool,
            directory: Path,
            output: Path | None,
            timeout: float,
            **own: Any,
        ) -> None:
            process.preload(*preload)
            directory = directory.resolve()
            directory.mkdir(parents=True, exist_ok=True)
            rounds = rounds or (QUICK_ROUNDS if quick else rounds_usual)
            settings = {"command": sys.argv[1:], "rounds": rounds, "is_quick": quick}
            results: Samples[Any] = Samples(
                machine.describe(ROOT), machine.disk(directory), settings
            )
            chosen = tuple(one for one in known if one in names)
            where = output_directory(output)
            path = where / f"{name}.json"
            report = measure(Run(chosen, rounds, quick, directory, timeout, results, path), **own)
            results.write(path, **report.derived)
            if report.draw is not None:
                for suffix in (".png", ".svg"):
                    report.draw((where / name).with_suffix(suffix))
            show(report.tables, where, name)

        for option in (
            click.option(
                "--timeout",
                default=timeout_seconds,
                show_default=True,
                help="Seconds for one process, at most.",
            ),
            common,
            names_option("--only", "names", known, f"{who}, separated by commas", default),
        ):
            main = option(main)
        return click.command(context_settings={"help_option_names": ["-h", "--help"]})(main)

    return command
