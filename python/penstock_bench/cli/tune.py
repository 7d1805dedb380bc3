"""`penstock bench io DIR --tune OUT`: the best settings for a directory, as options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from penstock.common.console import console, print_json, table
from penstock_bench.cli import outputs
from penstock_bench.results.compare import MARGIN
from penstock_bench.results.spread import known_spread
from penstock_bench.suites.io import tune as tuning
from penstock_bench.suites.io.trials import in_words, state_bytes
from penstock_bench.workloads.scaling import memory_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
    if not is_quiet and console(stderr=True).is_terminal:
        console(stderr=True).print(
            f"at most {seconds:g} s; Ctrl-C ends it and leaves nothing behind"
        )
    with outputs.progress(seconds, is_quiet=is_quiet, has_count=False) as update:

        def progress(passed: float, text: str) -> None:
            update(completed=passed, description=text)

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
        rows.add_row("best found", *_rates(best), found.verdict.gain.with_range(".2f"))
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
    seconds = [[one.save_seconds for one in trials], [one.load_seconds for one in trials]]
    return [
        known_spread(
            one.nbytes / took / 1e9 for one, took in zip(trials, each, strict=True)
        ).with_range(".2f")
        for each in seconds
    ]
