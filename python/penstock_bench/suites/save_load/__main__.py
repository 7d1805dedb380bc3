"""The command behind `make bench`: saves and loads by Penstock, fio and other libraries."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from penstock.common.machine.quiesce import quiesce
from penstock_bench.harness import memory, plots, tables
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.options import names_option
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.peers.save_load import CONTENDERS
from penstock_bench.results.samples import Sample, Samples
from penstock_bench.results.spread import plain
from penstock_bench.suites.save_load import child, fio
from penstock_bench.suites.save_load.bars import FIO, judge
from penstock_bench.suites.save_load.child import Task
from penstock_bench.suites.save_load.doubts import doubts
from penstock_bench.workloads import states

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Group
    from rich.table import Table

    from penstock_bench.harness.tables import Bar
    from penstock_bench.workloads.content import StateSpec

_SIZE_GIB, _QUICK_SIZE_GIB = 4.0, 1 / 16
_SCALING_GIB, _QUICK_SCALING_GIB = (2.0, 8.0), (1 / 32, 1 / 8)
_SCALING_CONTENDER = "penstock"
_FREE_TIMES_STATE = 2
"""Room for the largest checkpoint, for libraries that store tied tensors twice, and for fio."""
_SWEEP_BYTES_MAX = 1 << 30
_MIB = 1 << 20
_RATE = "gb_per_second"


@dataclass
class Operation(Sample):
    """A save or a load.

    Attributes:
        state: Name of the state.
        sync_seconds: The part of a save in which the harness synced every file.
        machine_cpu_seconds: Busy time of all processors.
        extra_bytes: Peak of the resident set beyond the state itself.
        disk_bytes: Bytes allocated to the files.
        files: Number of files.
        resident_fraction: Share of the files in the page cache before a load.
        dropped: How the page cache was emptied.
        is_checked: Whether the loaded state was compared with the saved one, bit for bit.
    """

    state: str = ""
    sync_seconds: float = 0.0
    machine_cpu_seconds: float = 0.0
    extra_bytes: int | None = None
    disk_bytes: int | None = None
    files: int | None = None
    resident_fraction: float | None = None
    dropped: str | None = None
    is_checked: bool = False

    @property
    def machine_cpu_seconds_per_gb(self) -> float | None:
        """Busy time of all processors for each GB; None of fio, where it is not counted."""
        return self.machine_cpu_seconds / self.nbytes * 1e9 or None

    @property
    def extra_mib(self) -> float | None:
        """Memory beyond the state."""
        return None if self.extra_bytes is None else self.extra_bytes / _MIB

    @property
    def disk_ratio(self) -> float | None:
        """Bytes on the disk for each byte of tensors."""
        return self.disk_bytes / self.nbytes if self.disk_bytes else None


COLUMNS = (
    ("save GB/s", "save", _RATE, ".3g"),
    ("load GB/s", "load", _RATE, ".3g"),
    ("CPU s/GB\nsave", "save", "cpu_seconds_per_gb", ".3f"),
    ("CPU s/GB\nload", "load", "cpu_seconds_per_gb", ".3f"),
    ("of machine\nsave", "save", "machine_cpu_seconds_per_gb", ".3f"),
    ("of machine\nload", "load", "machine_cpu_seconds_per_gb", ".3f"),
    ("extra MiB\nsave", "save", "extra_mib", ".0f"),
    ("extra MiB\nload", "load", "extra_mib", ".0f"),
    ("disk /\nstate", "save", "disk_ratio", ".3f"),
)


class Workload(NamedTuple):
    """A state to measure with: its label in the results, and its description."""

    label: str
    state: str
    size_bytes: int
    is_tiny: bool

    def spec(self) -> StateSpec:
        """The state."""
        return states.describe(self.state, self.size_bytes, self.is_tiny)


@suite(
    "bench",
    (FIO, *CONTENDERS),
    "Contenders",
    preload=["penstock_bench.suites.save_load.child"],
    timeout_seconds=900.0,
)
@names_option("--states", "state_names", states.NAMES, "States, separated by commas")
@click.option("--size-gib", type=click.FloatRange(min=0.001), help="Of the Llama state. [4]")
@click.option("--scaling", is_flag=True, help="Also time saves of 2 GiB and 8 GiB.")
def main(run: Run, state_names: tuple[str, ...], size_gib: float | None, scaling: bool) -> Report:
    """Compare Penstock with fio and with other libraries on the same state and disk."""
    size_gib = size_gib or (_QUICK_SIZE_GIB if run.is_quick else _SIZE_GIB)
    sizes = () if not scaling else _QUICK_SCALING_GIB if run.is_quick else _SCALING_GIB
    workloads = [
        Workload(name, name, int(size_gib * states.GIB), run.is_quick) for name in state_names
    ]
    scaled = [
        Workload(f"scaling-{size:g}-gib", "llama", int(size * states.GIB), run.is_quick)
        for size in sizes
    ]
    specs = {one.label: one.spec() for one in (*workloads, *scaled)}
    results = run.results
    results.extra |= {
        "states": {
            label: {
                "description": one.description,
                "bytes": one.nbytes,
                "tensors": len(one.tensors),
            }
            for label, one in specs.items()
        },
        "fio": {},
    }
    largest = max((spec.nbytes for spec in specs.values()), default=0)
    is_official = size_gib == _SIZE_GIB and not run.is_quick
    with run.at_work(_FREE_TIMES_STATE * largest, is_official=is_official):
        run.say("touching memory")
        results.extra["memory"] = memory.warm(largest)
        _Scenario(run, workloads, scaled).measure()
    bars = judge(results)
    derived = {"bars": [one.as_json() for one in bars], "summary": _summary(results)}
    return Report(_tables(results, bars), derived, functools.partial(_draw, results))


class _Scenario:
    def __init__(self, run: Run, workloads: list[Workload], scaled: list[Workload]) -> None:
        self._run = run
        self._workloads = workloads
        self._scaled = scaled
        self._fio: dict[str, fio.Setting] = {}

    def measure(self) -> None:
        """Sweeps fio's settings; in each round every contender saves and loads once."""
        if FIO in self._run.names and self._workloads:
            self._sweep()
        for workload in self._workloads:
            label = workload.label
            for index, name in self._run.in_rounds(self._run.names, f"{label}, {{}}".format):
                self._turn(name, workload, index)
        for index, workload in self._run.in_rounds(self._scaled, lambda one: one.label):
            self._child(_SCALING_CONTENDER, None, "save", workload, index)
            self._remove()

    def _sweep(self) -> None:
        size_bytes = max(workload.spec().nbytes for workload in self._workloads)
        try:
            self._fio, self._run.results.extra["fio"] = fio.sweep(
                self._run.place,
                min(size_bytes, _SWEEP_BYTES_MAX),
                self._run.is_quick,
                self._run.say,
            )
        except FioError as error:
            self._run.results.extra["fio"] = {"error": str(error)}

    def _turn(self, name: str, workload: Workload, index: int) -> None:
        if name == FIO:
            self._turn_of_fio(workload, index)
            return
        saved = self._child(name, None, "save", workload, index)
        for variant in (None, *CONTENDERS[name].load_variants):
            if saved:
                self._child(name, variant, "load", workload, index)
            else:
                self._add(_row(name, variant), "load", workload, index, {"error": "not saved"})
        self._remove()

    def _turn_of_fio(self, workload: Workload, index: int) -> None:
        place, nbytes = self._run.place, workload.spec().nbytes
        for operation in ("save", "load"):
            fields: dict[str, Any]
            try:
                if not self._fio:
                    raise FioError(self._run.results.extra["fio"]["error"])
                setting = self._fio[operation]
                # A read takes the setting that reads best, on files laid out for it.
                if operation == "load" and setting != self._fio["save"]:
                    fio.remove(place)
                    fio.run(setting, "save", place, nbytes)
                quiesce(place)
                done = fio.run(setting, operation, place, nbytes)
                fields = {**done._asdict(), "setting": str(setting)}
            except FioError as error:
                fields = {"error": str(error)}
            self._add(FIO, operation, workload, index, fields)
        fio.remove(place)

    def _child(
        self, name: str, variant: str | None, operation: str, workload: Workload, index: int
    ) -> bool:
        """Measures one operation in a process of its own; returns whether it succeeded."""
        row = _row(name, variant)
        fields: dict[str, Any]
        if CONTENDERS[name].missing:
            fields = {"error": f"{CONTENDERS[name].package} is not installed: run make bench"}
        else:
            task = Task(
                contender=name,
                variant=variant,
                operation=operation,
                state=workload.state,
                size_bytes=workload.size_bytes,
                is_tiny=workload.is_tiny,
                directory=str(self._run.place / "checkpoint"),
                is_checked=index == 0,
            )
            fields = self._run.child(child.run, task, (workload.label, row, operation))
        return self._add(row, operation, workload, index, fields)

    def _add(
        self, row: str, operation: str, workload: Workload, index: int, fields: dict[str, Any]
    ) -> bool:
        nbytes = workload.spec().nbytes
        sample = Operation(row, index, operation, nbytes, state=workload.label)
        return self._run.results.add(sample, fields).error is None

    def _remove(self) -> None:
        shutil.rmtree(self._run.place / "checkpoint", ignore_errors=True)


def _row(name: str, variant: str | None) -> str:
    return f"{name}:{variant}" if variant else name


def _rows(results: Samples[Operation], state: str) -> list[str]:
    return list(dict.fromkeys(one.row for one in results.samples if one.state == state))


def _errors(results: Samples[Operation], state: str, row: str) -> list[str]:
    samples = [one for one in results.samples if (one.state, one.row) == (state, row)]
    return list(dict.fromkeys(f"{one.operation}: {one.error}" for one in samples if one.error))


def _summary(results: Samples[Operation]) -> list[dict[str, Any]]:
    names = (
        _RATE,
        "seconds",
        "cpu_seconds_per_gb",
        "machine_cpu_seconds_per_gb",
        "extra_bytes",
    )
    return [
        {
            "state": state,
            "row": row,
            "operation": operation,
            **{
                name: plain(results.spread(row, name, state=state, operation=operation))
                for name in names
            },
            "errors": _errors(results, state, row),
        }
        for state in results.extra["states"]
        for row in _rows(results, state)
        for operation in ("save", "load")
    ]


def _tables(results: Samples[Operation], bars: list[Bar]) -> Group:
    lines = [
        f"interleaved rounds: {results.settings['rounds']}; median [least, most]; GB is 10^9 bytes "
        "of tensors; saves synced, loads cold and in memory of their own"
    ]
    told = results.extra["fio"]
    if best := told.get("best"):
        lines.append(f"fio writes with {best['save']}, reads with {best['load']}")
    parts: list[Any] = []
    if problem := told.get("error"):
        parts += tables.notes([f"NO COMPARISON WITH fio: {problem}"])
    for state in results.extra["states"]:
        if rows := _rows(results, state):
            failed = [f"{row}, {one}" for row in rows for one in _errors(results, state, row)]
            words = {row: _note(results, row) for row in rows if row in CONTENDERS}
            words = {row: note for row, note in words.items() if note}
            parts += [_table(results, state), *tables.notes(failed, words)]
            parts += [*doubts(results, state), ""]
    is_official = results.settings["is_official"]
    unofficial = None if is_official else "the bars are for a Llama state of 4 GiB"
    return tables.page(results, *parts, tables.bars(bars, unofficial), lines=lines)


def _note(results: Samples[Operation], row: str) -> str:
    """The settings of a contender, with its version."""
    entry = CONTENDERS[row]
    version = results.machine["versions"].get(entry.package)
    return f"{entry.package} {version}: {entry.note}" if entry.note else ""


def _table(results: Samples[Operation], state: str) -> Table:
    about = results.extra["states"][state]

    def speed(row: str) -> float:
        found = results.spread(row, _RATE, state=state, operation="save")
        return -found.median if found else 0.0

    def shown(row: str, operation: str, figure: str, form: str) -> str:
        found = results.spread(row, figure, state=state, operation=operation)
        if found:
            return found.with_range(form) if figure == _RATE else f"{found.median:{form}}"
        tried = [one for one in results.samples if (one.state, one.row) == (state, row)]
        has_failed = any(one.error for one in tried if one.operation == operation)
        return "FAILED" if has_failed and figure == _RATE else "-"

    rows = _rows(results, state)
    base = sorted({row.partition(":")[0] for row in rows}, key=speed)
    order = [row for name in base for row in rows if row.partition(":")[0] == name]
    return tables.figures(
        f"{state}: {about['description']}; {about['bytes'] / 1e9:.2f} GB",
        [heading for heading, *_ in COLUMNS],
        {row: [shown(row, *column) for _, *column in COLUMNS] for row in order},
        bold="penstock",
    )


def _draw(results: Samples[Operation], path: Path) -> None:
    """Plots rates with their range; a run without a single number has no plot."""
    if all(one.error for one in results.samples):
        return
    drawn = {
        state: _rows(results, state)
        for state in results.extra["states"]
        if not state.startswith("scaling") and _rows(results, state)
    }
    pairs = [(state, operation) for state in drawn for operation in ("save", "load")]
    rows_max = max(map(len, drawn.values()), default=0)
    title = (
        f"Interleaved rounds: {results.settings['rounds']}, median and range; "
        f"{results.machine['cores']} cores, {results.disk['file_system']}, "
        f"Linux {results.machine['kernel']}"
    )
    height = 1.2 + (0.34 * rows_max + 0.8) * len(drawn)
    with plots.figure(path, len(pairs), title, height=height) as axes:
        for (state, operation), axis in zip(pairs, axes, strict=True):
            found = {
                row: one
                for row in drawn[state]
                if (one := results.spread(row, _RATE, state=state, operation=operation))
            }
            device = found.pop(FIO, None)
            kind = "durable save" if operation == "save" else "cold load"
            size = results.extra["states"][state]["bytes"] / 1e9
            plots.bars(axis, found, f"{state} ({size:.2f} GB): {kind}", "GB/s")
            if device:
                plots.bound(axis, device, FIO)


if __name__ == "__main__":
    main()
