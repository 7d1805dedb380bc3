"""`penstock bench io DIR --tune OUT`: the best settings for a directory, as options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from penstock.common.console import console, print_json, table
from penstock_bench.results.compare import MARGIN
from penstock_bench.suites.io import tune as tuning
from penstock_bench.suites.io.search import spread
from penstock_bench.suites.io.trials import in_words, state_bytes
from penstock_bench.workloads.scaling import memory_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock_bench.results.results import Spread
    from penstock_bench.suites.io.search import Trial
    from penstock_bench.suites.io.tune import Tuning

_TAKEN = {"directory", "tune", "tune_seconds", "size", "rounds", "seed", "output", "as_json"}
"""The options of `bench io` that mean something with ``--tune``."""

_STAGING_BYTES = 256 << 20


def tune_io(
    directory: Path,
    out: Path,
    *,
    size: int,
    seconds: float,
    rounds: int,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> int:
    """Searches, writes what was found, and tells."""
    _check_options()
    _check_memory(size)
    found = _search(directory, size, seconds, max(rounds, tuning.ROUNDS_MIN), seed, as_json)
    found.write(out)
    if output is not None:
        found.results.write(output)
    if as_json:
        print_json(found.results.as_json())
    else:
        _print(found, out)
    return 0


def _check_options() -> None:
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name
        source = context.get_parameter_source(name) if name else None
        if name not in _TAKEN and source is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} goes without --tune, which chooses by itself what to measure"
            )


def _check_memory(size: int) -> None:
    """Refuses a state that would have to be swapped: it, what is loaded, and staging."""
    needed = 2 * state_bytes(size) + _STAGING_BYTES
    free = memory_bytes()
    if needed > free:
        raise click.UsageError(
            f"a state of {size / 1e9:.2f} GB and what is loaded of it take {needed / 1e9:.2f} GB "
            f"of memory, and {free / 1e9:.2f} are free: choose a smaller --size"
        )


def _search(
    directory: Path, size: int, seconds: float, rounds: int, seed: int, is_quiet: bool
) -> Tuning:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    display = console(stderr=True)
    hidden = is_quiet or not display.is_terminal
    if not hidden:
        display.print(f"at most {seconds:g} s; Ctrl-C ends it and leaves nothing behind")
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=display, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=seconds)

        def progress(passed: float, text: str) -> None:
            bar.update(task, completed=passed, description=text)

        return tuning.tune(
            directory, size, seconds=seconds, rounds=rounds, seed=seed, progress=progress
        )


def _print(found: Tuning, out: Path) -> None:
    display = console()
    what = f"{found.tried} settings tried in {found.seconds:.0f} s"
    if not found.is_finished:
        what += "; --tune-seconds was too short for more"
    if found.verdict is None:
        display.print(f"nothing was shown to be better than the defaults ({what})")
    else:
        numbers = ["save GB/s", "load GB/s", "times"]
        rows = table("", *numbers, numbers=numbers)
        usual, best = zip(*found.rounds, strict=True)
        rows.add_row("defaults", *_rates(usual), "")
        rows.add_row("best found", *_rates(best), _in_words(found.verdict.gain))
        display.print(rows)
        display.print(f"best found: {in_words(found.best)} ({what})")
        if not found.tuned:
            display.print(
                "the defaults are as good: it is not faster in every round, and by "
                f"{MARGIN:.0%} in the median, without losing as much of either"
            )
    if found.tuned:
        display.print(f"written to {out}, for penstock.Options.read or PENSTOCK_OPTIONS")
    else:
        display.print(f"{out} says so and sets nothing")


def _rates(trials: Sequence[Trial]) -> list[str]:
    return [
        _in_words(spread([one.nbytes / seconds / 1e9 for one, seconds in pairs]))
        for pairs in (
            [(one, one.save_seconds) for one in trials],
            [(one, one.load_seconds) for one in trials],
        )
    ]


def _in_words(one: Spread) -> str:
    return f"{one.median:.2f} [{one.least:.2f}, {one.most:.2f}]"
