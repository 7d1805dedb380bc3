"""How long training waits for saves of a framework: the command, the rounds, the table.

The benchmark of a framework names the ways to save and measures one save of one of them.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from penstock_bench.harness import tables
from penstock_bench.harness.options import WIDTH
from penstock_bench.harness.running import rotated
from penstock_bench.results.samples import quotient
from penstock_bench.results.spread import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

Found = dict[str, list[dict[str, float]]]
"""The figures of each way in each round, by their names, in seconds."""
WAIT = "waits"
"""The figure that is compared: the time that training waits for a save."""


def by_turns(
    ways: Sequence[str], rounds: int, save: Callable[[str, int], dict[str, float]]
) -> Found:
    """Saves once a round in every way, each round in another order.

    One more round comes before those that count, and fills the caches and the memory that later
    ones find. The function saves in a way, in a round, and returns its figures.
    """
    found: Found = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in rotated(ways, number):
            figures = save(way, number)
            if number:
                found[way].append(figures)
    return found


def stall(step: Callable[[], float], save: Callable[[], object]) -> float:
    """Seconds of a save's call, and what the step behind it takes longer than others."""
    usual = statistics.median(step() for _ in range(3))
    began = time.perf_counter()
    save()
    called = time.perf_counter() - began
    return called + max(step() - usual, 0)


def command(
    *own: str, rounds_usual: int = 7
) -> Callable[[Callable[..., tuple[str, Found]]], click.Command]:
    """Makes a command of a function that measures in a directory, for a number of rounds.

    The function returns a title and its figures, of which `WAIT` is one. The waits are compared
    with those of the framework's own ways.
    """

    def make(measure: Callable[..., tuple[str, Found]]) -> click.Command:
        @functools.wraps(measure)
        def main(rounds: int, directory: str | None, **options: Any) -> None:
            with tempfile.TemporaryDirectory(prefix="penstock-", dir=directory) as place:
                title, found = measure(Path(place), rounds, **options)
            Console(width=WIDTH).print(_table(f"{title}, {rounds} rounds", found, own))

        for option in (
            click.option(
                "--rounds", type=click.IntRange(1), default=rounds_usual, show_default=True
            ),
            click.option("--directory", help="On the storage to measure. [a temporary one]"),
        ):
            main = option(main)
        return click.command(context_settings={"help_option_names": ["-h", "--help"]})(main)

    return make


def _table(title: str, found: Found, own: Sequence[str]) -> Table:
    """Seconds of each way, and its wait within a round by that of the framework's own ways."""
    names = list(next(iter(found.values()))[0])
    waits = {way: {at: one[WAIT] for at, one in enumerate(each)} for way, each in found.items()}
    return tables.figures(
        f"{title}, seconds: median [least, most]",
        [*names, *(f"of {one}" for one in own)],
        {
            way: [
                *(tables.cell(spread(one[name] for one in each), ".3f") for name in names),
                *(tables.cell(quotient(waits[way], waits[one]), ".2f") for one in own),
            ]
            for way, each in found.items()
        },
        bold="penstock",
    )
