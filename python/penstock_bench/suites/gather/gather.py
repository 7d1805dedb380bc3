"""Rows by id: who gathers how many a second, with how many requests."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import features
from penstock.common.machine.limits import LimitError, limited
from penstock.common.machine.quiesce import quiesce_after
from penstock_bench.harness import storage
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.running import rotated, run_module
from penstock_bench.peers.gather import GATHERERS, OURS, POOL, POOL_THREADS
from penstock_bench.peers.gather.base import KEY, Setting
from penstock_bench.results.results import Measurement
from penstock_bench.suites.gather import random_reads, replays
from penstock_bench.suites.gather.cases import (
    CASES,
    FIO,
    FIO_POOL,
    POLICIES,
    Case,
    Plan,
    table_size,
)
from penstock_bench.suites.gather.random_reads import Region
from penstock_bench.workloads import row_content

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_bench.results.results import Results

_RESIDENT_MAX = 0.01
"""The largest cached part of a table for a read to be called cold, or direct."""
_COUNTED_MIN = 0.99
"""The least part of the requested bytes that the kernel has to read for reads to be direct."""


@dataclass(slots=True)
class Gather:
    """A run of it."""

    plan: Plan
    results: Results
    progress: Callable[[str], object]
    _failed: set[tuple[str, str]] = field(default_factory=set)
    _regions: dict[str, Region] = field(default_factory=dict)
    _best: dict[str, random_reads.Load] = field(default_factory=dict)
    _unlimited: str | None = None

    def run(self) -> None:
        """Makes tables and traces, prepares every library, and measures in rounds."""
        cases = [CASES[name] for name in self.plan.cases if name in CASES]
        for case in cases:
            np.save(self._trace(case), case.ids(self.plan))
            self.results.cases[case.name] = {"pattern": case.name, **self._described(case)}
        for table in dict.fromkeys(case.table for case in cases):
            self._make(table)
        for case in cases:
            self._prepare(case)
        for number in range(self.plan.rounds):
            for case in rotated(cases, number):
                self._round(case, number)
        if POLICIES in self.plan.cases:
            replays.replay(self.plan, self.results, self.progress)

    def _described(self, case: Case) -> dict[str, Any]:
        ids = np.load(self._trace(case), mmap_mode="r")
        return {
            **asdict(table_size(self.plan, case.table)),
            "batches": ids.shape[0],
            "batch_rows": ids.shape[1],
            "cache_bytes": case.cache_bytes(self.plan),
        }

    def _make(self, table: str) -> None:
        """Writes a table and looks what the device is best at."""
        size = table_size(self.plan, table)
        self.progress(f"making a table of {size.rows:,} rows of {size.row_bytes} bytes")
        features.write(
            self.plan.work / table,
            row_content.chunks(size.rows, size.row_bytes),
            key=KEY,
            shape=(size.rows, size.row_bytes // row_content.WORD_BYTES),
            dtype=np.int64,
            # So that others can read the same file.
            align=False,
        )
        with features.open(self.plan.work / table, KEY, check=False) as opened:
            (segment,) = opened.source.segments
        nbytes = size.rows * size.row_bytes
        self._regions[table] = Region(Path(segment.path), segment.offset, nbytes, size.row_bytes)
        quiesce_after(self.plan.work, nbytes)
        uses = {case.fio for case in CASES.values() if case.table == table}
        if "random" in uses:
            self.progress("fio: at which depth random reads are fastest")
            try:
                self._best[table] = random_reads.best(self._regions[table])
            except FioError as error:
                self._failed |= {(name, by) for name in CASES for by in (FIO, FIO_POOL)}
                self._take_error(next(iter(self.results.cases)), FIO, 0, str(error))
            else:
                best = self._best[table]
                self.results.settings |= {"fio_depth": best.depth, "fio_jobs": best.jobs}

    def _prepare(self, case: Case) -> None:
        for name in self._names(case):
            if not GATHERERS[name].has_files or self._place(case, name).exists():
                continue
            self.progress(f"{name} makes its files")
            made = self._child(case, name, is_preparing=True)
            quiesce_after(self.plan.work, self._regions[case.table].nbytes)
            if "error" in made:
                self._give_up(case.name, name, 0, made["error"])

    def _names(self, case: Case) -> list[str]:
        names = case.names if self.plan.names is None else self.plan.names
        return [name for name in names if GATHERERS[name].missing is None]

    def _round(self, case: Case, number: int) -> None:
        for name in rotated(self._names(case), number):
            if (case.name, name) in self._failed:
                continue
            # Devices drift: what this one gives is asked before and after ours.
            if name == OURS:
                self._fio(case, number)
            self.progress(f"round {number + 1} of {self.plan.rounds}, {case.name}: {name}")
            found = self._child(case, name)
            if "error" in found:
                self._give_up(case.name, name, number, found["error"])
            else:
                self._take(case, name, number, found)
            if name == OURS:
                self._fio(case, number)
            if name == POOL:
                self._fio(case, number, is_pool=True)

    def _child(self, case: Case, name: str, *, is_preparing: bool = False) -> dict[str, Any]:
        """Runs a process within the limit, with nothing of its files in memory."""
        place, region = self._place(case, name), self._regions[case.table]
        place.mkdir(exist_ok=True)
        entry = GATHERERS[name]
        is_part = entry.waits and not case.is_cached
        setting = Setting(
            table=str(self.plan.work / case.table),
            file=str(region.file),
            offset=region.offset,
            rows=region.nbytes // region.block_bytes,
            row_bytes=region.block_bytes,
            place=str(place),
            cache_bytes=case.cache_bytes(self.plan),
            depth=self._best[case.table].in_flight if case.table in self._best else 0,
        )
        job = {
            "by": name,
            "setting": asdict(setting),
            "trace": str(self._trace(case)),
            "is_preparing": is_preparing,
            "is_warm": case.is_warm,
            "seconds_max": self.plan.seconds_max if is_part else None,
            "group": None,
        }
        if is_preparing:
            return self._run(job)
        files = [region.file, *(path for path in place.rglob("*") if path.is_file())]
        os.sync()
        storage.drop(files)
        warm = storage.resident_fraction(files)
        if case.is_warm:
            found = self._run(job)
        else:
            found = self._limited(job, self.plan.limit_bytes + entry.library_bytes)
        return found | {"warm": warm, "resident": storage.resident_fraction([region.file])}

    def _limited(self, job: dict[str, Any], nbytes: int) -> dict[str, Any]:
        """In a control group, where one can be made."""
        try:
            with limited(nbytes) as group:
                return self._run(job | {"group": str(group.processes)})
        except LimitError as error:
            self._unlimited = f"memory is not limited: {error}"
            return self._run(job)

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        module = "penstock_bench.suites.gather.gathering"
        return run_module(module, job, timeout_seconds=self.plan.timeout_seconds)

    def _take(self, case: Case, name: str, number: int, found: dict[str, Any]) -> None:
        notes = list(found.get("notes", []))
        if self._unlimited is not None and not case.is_warm:
            notes.append(self._unlimited)
        if found["warm"] > _RESIDENT_MAX:
            notes.append(f"{found['warm']:.0%} of the files were in memory before")
        is_direct, asked_bytes = found.get("is_direct", False), found.get("asked_bytes", 0)
        if is_direct and found["resident"] > _RESIDENT_MAX:
            is_direct = False
            notes.append(f"asked for direct I/O, and {found['resident']:.0%} of it is in memory")
        if is_direct and found["read_bytes"] < _COUNTED_MIN * asked_bytes:
            is_direct = False
            notes.append(f"asked for {asked_bytes}, and storage gave {found['read_bytes']} bytes")
        self.results.measurements.append(
            Measurement(
                case=case.name,
                by=name,
                round_index=number,
                nbytes=found["rows"] * self._regions[case.table].block_bytes,
                requests=found.get("requests", 0),
                seconds=found["seconds"],
                open_seconds=found["open_seconds"],
                cpu_seconds=found["cpu_seconds"],
                is_direct=is_direct,
                setup=found.get("setup", ""),
                notes=notes,
                checked=found["rows"],
                resident_fraction=found["resident"],
                memory_peak_bytes=found["memory_peak_bytes"],
                rows=found["rows"],
                hits=found.get("hits"),
                read_bytes=found["read_bytes"],
            )
        )

    def _fio(self, case: Case, number: int, *, is_pool: bool = False) -> None:
        """The same bytes by fio: at random, by a pool of threads, or one behind the other."""
        by = FIO_POOL if is_pool else FIO
        if not case.fio or (case.fio == "scan" and is_pool) or (case.name, by) in self._failed:
            return
        self.progress(f"round {number + 1} of {self.plan.rounds}, {case.name}: {by}")
        region = self._regions[case.table]
        if case.fio == "scan":
            load = random_reads.SCAN
        elif is_pool:
            load = random_reads.pool(POOL_THREADS, self._best[case.table].block_bytes)
        else:
            load = self._best[case.table]
        ids = np.load(self._trace(case), mmap_mode="r")
        try:
            made = random_reads.measured(region, load, None if case.fio == "scan" else ids.size)
        except FioError as error:
            self._give_up(case.name, by, number, str(error))
            return
        made.case, made.by, made.round_index = case.name, by, number
        if case.fio == "scan":
            # It has read the rows that were asked for, and all the others.
            made.rows, made.nbytes = int(ids.size), int(ids.size) * region.block_bytes
        self.results.measurements.append(made)

    def _give_up(self, case: str, by: str, number: int, error: str) -> None:
        self._failed.add((case, by))
        self._take_error(case, by, number, error)

    def _take_error(self, case: str, by: str, number: int, error: str) -> None:
        self.results.measurements.append(
            Measurement(case=case, by=by, round_index=number, error=error)
        )

    def _trace(self, case: Case) -> Path:
        return self.plan.work / f"{case.name}.npy"

    def _place(self, case: Case, name: str) -> Path:
        return self.plan.work / f"{case.table}-{name}"
