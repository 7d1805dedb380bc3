"""Finds the settings that are best for a directory, by saving and loading a state there."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock
from penstock.common.machine import facts
from penstock.options import DEFAULTS, Options
from penstock_bench.harness.running import BenchError, unused
from penstock_bench.results.results import Results
from penstock_bench.suites.io.search import Search, Trial, Verdict, decide
from penstock_bench.suites.io.trials import AXES, Trials, changed, make_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.reports import SaveReport
    from penstock_bench.results.spread import Spread

ROUNDS_MIN = 7
"""The least rounds of a decision: equal settings are ahead in all of 7 once in 128 times."""


class Tuning(NamedTuple):
    """The result of a search.

    Nothing is tuned where the defaults are as good as the best that was found. There is no
    verdict where nothing else came near, or time ran out first.
    """

    tuned: dict[str, Any]
    best: dict[str, Any]
    verdict: Verdict | None
    rounds: list[tuple[Trial, Trial]]
    tried: int
    is_finished: bool
    seconds: float
    results: Results
    device: str | None

    def write(self, path: Path) -> None:
        """Writes the settings as options that load anywhere."""
        about: dict[str, Any] = {
            "by": f"penstock {penstock.__version__} bench io --tune",
            "measured": self.results.created,
            "host": os.uname().nodename,
            "device": self.device,
            **{name: self.results.disk[name] for name in ("directory", "file_system")},
            "state_bytes": self.results.settings["size_bytes"],
            "settings_tried": self.tried,
        }
        if self.tuned and self.verdict is not None:
            for name in ("gain", "save", "load"):
                about[f"{name}_times_default"] = _rounded(getattr(self.verdict, name))
        else:
            about["note"] = (
                "nothing was shown to be better than the defaults by more than the spread"
            )
        Options(**{**DEFAULTS, **self.tuned}).write(path, about=about)


def tune(
    directory: Path,
    total_bytes: int,
    *,
    seconds: float,
    rounds: int,
    seed: int,
    progress: Callable[[float, str], object],
) -> Tuning:
    """Searches for settings that save and load faster than the defaults.

    Leaves nothing behind. Nothing begins that would end after so many seconds.
    """
    began = time.monotonic()
    # The search replaces the environment's values of these settings; all others keep theirs.
    default = Options(**{name: DEFAULTS[name] for name in AXES})
    settings = {"size_bytes": total_bytes, "rounds": rounds, "seed": seed, "seconds": seconds}
    results = Results(
        kind="tune", machine=facts.machine(), disk=facts.disk(directory), settings=settings
    )
    work = unused(directory)
    work.mkdir()
    try:
        bench = Trials(work, make_state(total_bytes, seed), results, began + seconds, progress)
        usual = bench.warm_up(default)
        search = Search(bench.measure, default)
        bench.reserve(2 * rounds)
        is_finished = search.run(_axes(usual))
        bench.reserve(0)
        if not search.tried:
            raise BenchError(
                f"a save and a load take {bench.slowest_seconds:.1f} s: within {seconds:g} s no "
                "settings can be compared; allow more time or choose a smaller state"
            )
        decided: list[tuple[Trial, Trial]] = []
        verdict = None
        if search.best != default:
            is_decided = bench.decide(default, search.best, rounds, decided)
            is_finished &= is_decided
            verdict = decide(decided) if is_decided else None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    best = changed(search.best)
    tuned = best if verdict is not None and verdict.is_better else {}
    results.settings["tuned"] = tuned
    passed = time.monotonic() - began
    tried = len(search.tried)
    return Tuning(tuned, best, verdict, decided, tried, is_finished, passed, results, bench.device)


def _axes(usual: SaveReport) -> dict[str, list[Any]]:
    """The values to try: the default, and those that it does not resolve to."""
    threads_max = max(2, 2 * len(os.sched_getaffinity(0)))
    return {
        name: [
            DEFAULTS[name],
            *(
                one
                for one in values
                if one != getattr(usual, name) and (name != "io_threads" or one <= threads_max)
            ),
        ]
        for name, values in AXES.items()
    }


def _rounded(spread: Spread) -> dict[str, float]:
    return {name: round(getattr(spread, name), 3) for name in ("median", "least", "most")}
