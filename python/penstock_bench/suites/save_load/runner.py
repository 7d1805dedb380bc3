"""Interleaved rounds: in each, every contender saves and loads once, in an order that rotates."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.common.machine.quiesce import settle
from penstock_bench.harness import process
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.running import rotated
from penstock_bench.peers.save_load import CONTENDERS
from penstock_bench.suites.save_load import child, fio
from penstock_bench.suites.save_load.child import Task
from penstock_bench.suites.save_load.results import Results, Sample
from penstock_bench.workloads import states

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock_bench.workloads.content import StateSpec

FIO = "fio"
NAMES = (FIO, *CONTENDERS)
SCALING_CONTENDER = "penstock"

process.preload("penstock_bench.suites.save_load.child")

_SWEEP_BYTES_MAX = 1 << 30


@dataclass(frozen=True)
class Workload:
    """A state to measure with: its label in the results, and what describes it."""

    label: str
    state: str
    size_bytes: int
    is_tiny: bool

    def spec(self) -> StateSpec:
        """The state."""
        return states.describe(self.state, self.size_bytes, self.is_tiny)


@dataclass(frozen=True)
class Plan:
    """What a run measures."""

    names: tuple[str, ...]
    workloads: tuple[Workload, ...]
    scaling: tuple[Workload, ...]
    rounds: int
    directory: Path
    timeout_seconds: float
    is_quick: bool

    @property
    def operations(self) -> int:
        """How many saves and loads there are, as a progress bar counts them."""
        variants = sum(len(CONTENDERS[name].load_variants) for name in self.names if name != FIO)
        each = 2 * len(self.names) + variants
        return self.rounds * (each * len(self.workloads) + len(self.scaling))


class Runner:
    """Runs a plan and adds what it measures to the results."""

    def __init__(
        self, plan: Plan, results: Results, place: Path, progress: Callable[[str, int], None]
    ) -> None:
        """Works in a place of its own; reports as `harness.progress.shown` takes it."""
        self._plan = plan
        self._results = results
        self._progress = progress
        self._place = place
        # Cells that failed or took too long; they are not tried again in later rounds.
        self._given_up: dict[tuple[str, str, str], str] = {}
        self._fio: dict[str, fio.Setting] = {}
        self._fio_problem: str | None = None

    def run(self) -> None:
        """Measures everything."""
        if FIO in self._plan.names and self._plan.workloads:
            self._sweep()
        for workload in self._plan.workloads:
            for index in range(self._plan.rounds):
                self._round(workload, index)
        for index in range(self._plan.rounds):
            for workload in rotated(self._plan.scaling, index):
                self._save(SCALING_CONTENDER, workload, index)
                self._remove()

    def _sweep(self) -> None:
        size_bytes = max(workload.spec().nbytes for workload in self._plan.workloads)
        try:
            self._fio, self._results.fio = fio.sweep(
                self._place,
                min(size_bytes, _SWEEP_BYTES_MAX),
                self._plan.is_quick,
                lambda text: self._progress(text, 0),
            )
        except FioError as error:
            self._fio_problem = str(error)
            self._results.fio = {"error": self._fio_problem}

    def _round(self, workload: Workload, index: int) -> None:
        for name in rotated(self._plan.names, index):
            if name == FIO:
                self._run_fio(workload, index)
                continue
            saved = self._save(name, workload, index)
            for variant in (None, *CONTENDERS[name].load_variants):
                if saved:
                    self._child(name, variant, "load", workload, index)
                else:
                    self._add(name, variant, "load", workload, index, {"error": "not saved"})
            self._remove()

    def _save(self, name: str, workload: Workload, index: int) -> bool:
        return self._child(name, None, "save", workload, index).error is None

    def _run_fio(self, workload: Workload, index: int) -> None:
        nbytes = workload.spec().nbytes
        for operation in ("save", "load"):
            fields: dict[str, Any] = {"error": self._fio_problem}
            if not self._fio_problem:
                setting = self._fio[operation]
                self._progress(f"{workload.label}, round {index + 1}: fio {operation}", 0)
                try:
                    # A read takes the setting that reads best, on files laid out for it.
                    if operation == "load" and setting != self._fio["save"]:
                        fio.remove(self._place)
                        fio.run(setting, "save", self._place, nbytes)
                    settle(self._place)
                    done = fio.run(setting, operation, self._place, nbytes)
                    fields = {
                        "state_bytes": done.nbytes,
                        "seconds": done.seconds,
                        "cpu_seconds": done.cpu_seconds,
                        "detail": {"setting": str(setting)},
                    }
                except FioError as error:
                    fields = {"error": str(error)}
            self._add(FIO, None, operation, workload, index, fields)
        fio.remove(self._place)

    def _child(
        self, name: str, variant: str | None, operation: str, workload: Workload, index: int
    ) -> Sample:
        """One operation in a process of its own."""
        label = f"{name}:{variant}" if variant else name
        self._progress(f"{workload.label}, round {index + 1}: {label} {operation}", 0)
        cell = (workload.label, label, operation)
        fields: dict[str, Any]
        if CONTENDERS[name].missing:
            fields = {"error": f"{CONTENDERS[name].package} is not installed: run make bench"}
        elif cell in self._given_up:
            fields = {"error": self._given_up[cell]}
        else:
            task = Task(
                contender=name,
                variant=variant,
                operation=operation,
                state=workload.state,
                size_bytes=workload.size_bytes,
                is_tiny=workload.is_tiny,
                directory=str(self._place / "checkpoint"),
                is_checked=index == 0,
            )
            (fields,) = process.run(child.run, [task], self._place, self._plan.timeout_seconds)
        if fields.get("error"):
            self._given_up[cell] = fields["error"]
        return self._add(name, variant, operation, workload, index, fields)

    def _add(
        self,
        name: str,
        variant: str | None,
        operation: str,
        workload: Workload,
        index: int,
        fields: dict[str, Any],
    ) -> Sample:
        sample = Sample(
            **{
                "state": workload.label,
                "round_index": index,
                "row": f"{name}:{variant}" if variant else name,
                "operation": operation,
                "state_bytes": workload.spec().nbytes,
                **fields,
            }
        )
        self._results.samples.append(sample)
        self._progress("", 1)
        return sample

    def _remove(self) -> None:
        shutil.rmtree(self._place / "checkpoint", ignore_errors=True)
