"""Saves and loads of a state with one set of options after the other."""

from __future__ import annotations

import math
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import penstock
from penstock.options import DEFAULTS
from penstock_bench.harness import storage
from penstock_bench.harness.cases import MIB, tensor_sizes
from penstock_bench.harness.running import BenchError, rotated
from penstock_bench.results.results import Measurement
from penstock_bench.suites.io.search import OutOfTime, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.options import Options
    from penstock.reports import LoadReport, SaveReport
    from penstock_bench.results.results import Results

AXES: dict[str, list[Any]] = {
    "io_threads": [1, 2, 4, 8, 16],
    "extent_bytes": [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB],
    "queue_depth": [2, 4, 8, 16, 32, 64],
    "engine": ["uring", "threads"],
}
"""The values to try, in the order in which the settings tend to matter."""


class Trials:
    """Saves and loads a state with some settings and others, and keeps what was measured.

    The last trial has to be over at a moment of the monotonic clock.
    """

    def __init__(
        self,
        work: Path,
        state: dict[str, Any],
        results: Results,
        ends_at: float,
        progress: Callable[[float, str], object],
    ) -> None:
        self._path = work / "checkpoint"
        self._state = state
        self._results = results
        self._began_at = time.monotonic()
        self._ends_at = ends_at
        self._reserved = 0
        self._progress = progress
        self._round_index = 0
        self.slowest_seconds = 0.0
        self.device: str | None = None

    def warm_up(self, default: Options) -> SaveReport:
        """A save and a load that do not count: the first of a process makes what others find."""
        try:
            saved, _ = self._run(default)
        except penstock.PenstockError as error:
            raise BenchError(f"saving and loading fails with the defaults: {error}") from error
        self.device = saved.device
        return saved

    def reserve(self, trials: int) -> None:
        """Keeps back the time for so many trials."""
        self._reserved = trials

    def measure(self, candidates: Sequence[Options]) -> dict[Options, Trial]:
        """Each once.

        Raises:
            OutOfTime: There is no time for all of them.
            BenchError: The first, the defaults, fails.
        """
        trials = {}
        for options in rotated(candidates, self._round_index):
            if time.monotonic() + (1 + self._reserved) * self.slowest_seconds > self._ends_at:
                raise OutOfTime
            trials[options] = self._trial(options)
            if trials[options].ran is None and options == candidates[0]:
                error = self._results.measurements[-1].error
                raise BenchError(f"saving and loading fails with the defaults: {error}")
        self._round_index += 1
        return trials

    def decide(
        self, default: Options, best: Options, rounds: int, decided: list[tuple[Trial, Trial]]
    ) -> bool:
        """Adds rounds of the two to a list; returns whether there was time for all."""
        try:
            for _ in range(rounds):
                trials = self.measure([default, best])
                decided.append((trials[default], trials[best]))
        except OutOfTime:
            return False
        return True

    def _trial(self, options: Options) -> Trial:
        name = label(options)
        self._progress(time.monotonic() - self._began_at, name)
        for call in ("save", "load"):
            self._results.cases[f"{call}, {name}"] = {"call": call, **changed(options)}
        try:
            saved, loaded = self._run(options)
        except penstock.PenstockError as error:
            self._keep(f"save, {name}", error=str(error))
            return Trial(math.inf, math.inf, 0, None)
        sync_seconds = saved.phases["sync"]
        self._keep(
            f"save, {name}",
            nbytes=saved.bytes,
            seconds=saved.seconds - sync_seconds,
            sync_seconds=sync_seconds,
            **_facts(saved),
        )
        self._keep(f"load, {name}", nbytes=loaded.bytes, seconds=loaded.seconds, **_facts(loaded))
        ran = (*_settings(saved), *_settings(loaded))
        return Trial(saved.seconds, loaded.seconds, loaded.bytes, ran)

    def _run(self, options: Options) -> tuple[SaveReport, LoadReport]:
        began = time.monotonic()
        reports: list[LoadReport] = []
        try:
            saved = penstock.save(self._path, self._state, options=options, no_dist=True)
            storage.drop(self._path.iterdir())
            penstock.load(self._path, options=options, report=reports.append)
        finally:
            shutil.rmtree(self._path, ignore_errors=True)
        self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)
        return saved, reports[0]

    def _keep(self, case: str, **fields: Any) -> None:
        made = Measurement(case=case, by="penstock", round_index=self._round_index, **fields)
        self._results.measurements.append(made)


def _facts(report: SaveReport | LoadReport) -> dict[str, Any]:
    return {
        "is_direct": report.direct_io,
        "setup": f"{report.engine} {report.engine_setup}",
        "notes": [*report.fallbacks, *report.choices],
    }


def _settings(report: SaveReport | LoadReport) -> tuple[Any, ...]:
    return report.direct_io, *(getattr(report, name) for name in AXES)


def state_bytes(total_bytes: int) -> int:
    """Bytes of the state that is saved."""
    return sum(tensor_sizes(total_bytes))


def label(options: Options) -> str:
    """Settings in words."""
    return in_words(changed(options))


def in_words(settings: dict[str, Any]) -> str:
    """The settings that differ from the defaults, in words."""
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "defaults"


def changed(options: Options) -> dict[str, Any]:
    """The tried settings that differ from the defaults."""
    values = {name: getattr(options, name) for name in AXES}
    return {name: value for name, value in values.items() if value != DEFAULTS[name]}


def make_state(total_bytes: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of a transformer, of bytes that no device can compress."""
    generator = np.random.default_rng(seed)
    return {
        f"tensor{index}": generator.integers(0, 1 << 63, nbytes // 8, np.uint64).view(np.float16)
        for index, nbytes in enumerate(tensor_sizes(total_bytes))
    }
