"""The command behind `make bench SUITE=pyg`."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import TYPE_CHECKING

import click

from penstock.common.machine.limits import LimitError, limited
from penstock.common.machine.quiesce import settle
from penstock.integrations.pyg.synthetic import WIDTH, Igbh
from penstock_bench.harness import cache, fio, machine, process, progress
from penstock_bench.harness.fio import FioError
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
from penstock_bench.suites.pyg import place as files
from penstock_bench.suites.pyg import report, worker
from penstock_bench.suites.pyg.results import FIO, PEERS, PENSTOCK, ROWS, Results, Sample
from penstock_bench.suites.pyg.worker import Task

if TYPE_CHECKING:
    from pathlib import Path

_SCALE, _QUICK_SCALE = 0.002, 0.0001
_BATCHES, _QUICK_BATCHES = 200, 6
_PEER_BATCHES = 2
_BASE_BYTES = 1 << 30
"""What an epoch has beside features: libraries, edges, batches under way."""
_FREE_TIMES_TABLES = 1.5
_FIO_SECONDS, _QUICK_FIO_SECONDS = 4, 1
_DEPTHS, _JOBS = (32, 64, 128), (1, 2)

process.preload("penstock_bench.suites.pyg.worker")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@names_option("--only", "names", tuple(ROWS), "What is measured, separated by commas")
@common
@click.option("--scale", type=float, help=f"Of IGBH-full, 2.2 TB of features. [{_SCALE}]")
@click.option("--ordered", is_flag=True, help="Nodes numbered by their edges, not at random.")
@click.option("--batches", type=click.IntRange(min=1), help=f"Of an epoch. [{_BATCHES}]")
@click.option("--peer-batches", default=_PEER_BATCHES, help=f"Of PyG's. [{_PEER_BATCHES}]")
@click.option("--batch-size", default=512, show_default=True, help="Papers that each is of.")
@click.option("--fan-out", default="10,5", show_default=True, help="Neighbours of each hop.")
@click.option("--width", default=16, show_default=True, help="Of what is between the layers.")
@click.option("--cache-share", default=0.1, show_default=True, help="Of all rows, that stay.")
@click.option("--memory-share", default=0.25, show_default=True, help="Of all rows, of memory.")
@click.option("--window", default=16, show_default=True, help="Batches that the cache knows.")
@click.option("--ahead", default=2, show_default=True, help="Batches that are gathered ahead.")
@click.option("--workers", default=1, show_default=True, help="Processes that sample.")
@click.option("--timeout", default=1200.0, show_default=True, help="Seconds for one process.")
def main(
    names: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    directory: Path,
    output: Path | None,
    scale: float | None,
    ordered: bool,
    batches: int | None,
    peer_batches: int,
    batch_size: int,
    fan_out: str,
    width: int,
    cache_share: float,
    memory_share: float,
    window: int,
    ahead: int,
    workers: int,
    timeout: float,
) -> None:
    """An epoch of a graph network whose features are on storage, with memory limited."""
    made = Igbh(scale or (_QUICK_SCALE if quick else _SCALE), is_permuted=not ordered)
    table_bytes = sum(made.nodes.values()) * WIDTH * 4
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    task = Task(
        kind="",
        place="",
        group=None,
        seed=0,
        batches=batches or (_QUICK_BATCHES if quick else _BATCHES),
        batch_size=batch_size,
        fan_out=tuple(int(one) for one in fan_out.split(",")),
        width=width,
        cache_bytes=int(table_bytes * cache_share),
        window=window,
        ahead=ahead,
        workers=workers,
    )
    results = Results(
        machine=machine.describe(ROOT),
        disk=machine.disk(directory),
        settings={
            **dataclasses.asdict(task),
            "command": sys.argv[1:],
            "rounds": rounds or (QUICK_ROUNDS if quick else ROUNDS),
            "peer_batches": min(peer_batches, task.batches),
            "scale": made.scale,
            "is_permuted": made.is_permuted,
            "table_bytes": table_bytes,
            "memory_bytes": _BASE_BYTES + int(table_bytes * memory_share),
        },
    )
    with workplace(directory, _FREE_TIMES_TABLES * table_bytes) as place:
        seconds = _QUICK_FIO_SECONDS if quick else _FIO_SECONDS
        _Runner(results, names, place, task, made, timeout, seconds).run()
    where = output_directory(output)
    results.write(where / "pyg.json")
    show(report.render(results), where, "pyg")


class _Runner:
    """Measures everything, with a progress bar on standard error."""

    def __init__(
        self,
        results: Results,
        names: tuple[str, ...],
        place: Path,
        task: Task,
        made: Igbh,
        timeout_seconds: float,
        fio_seconds: int,
    ) -> None:
        self._results = results
        self._names = [name for name in ROWS if name in names]
        self._place = place
        self._task = dataclasses.replace(task, place=str(place))
        self._made = made
        self._timeout_seconds = timeout_seconds
        self._fio_seconds = fio_seconds

    def run(self) -> None:
        """The files, fio's best setting, then rounds."""
        rounds: int = self._results.settings["rounds"]
        steps = 2 + len(self._made.nodes) + rounds * len(self._names)
        with progress.shown(steps, "graph") as tell:
            files.write(self._place, self._made, tell)
            tell("fio", 0)
            best = self._best() if FIO in self._names else None
            tell("", 1)
            for index in range(rounds):
                # What fio's rate is multiplied with comes from the epoch of the round.
                names = rotated([name for name in self._names if name != FIO], index)
                for name in names:
                    tell(f"round {index + 1}: {name}", 0)
                    self._epoch(name, index)
                    tell("", 1)
                if best is not None:
                    tell(f"round {index + 1}: fio", 0)
                    self._bound(best, index)
                    tell("", 1)

    def _epoch(self, name: str, index: int) -> None:
        settle(self._place)
        cache.drop([path for path in self._place.rglob("*") if path.is_file()])
        settings = self._results.settings
        batches = settings["peer_batches" if name in PEERS else "batches"]
        task = dataclasses.replace(self._task, kind=name, seed=index, batches=batches)
        try:
            with limited(settings["memory_bytes"]) as group:
                task = dataclasses.replace(task, group=str(group.processes))
                (found,) = process.run(worker.run, [task], self._place, self._timeout_seconds)
                found["group_peak_bytes"] = group.peak_bytes
        except LimitError as error:
            found = {"error": f"memory cannot be limited: {error}"}
        self._results.samples.append(Sample.of_epoch(name, index, found))

    def _bound(self, setting: tuple[int, int], index: int) -> None:
        """The misses of the round's epoch, at fio's rate."""
        sample = Sample(FIO, index)
        epochs = [one for one in self._results.samples if one.row == PENSTOCK and not one.error]
        misses = next((one.detail["read_rows"] for one in epochs if one.round_index == index), None)
        try:
            rate = self._rate(setting)
            sample.detail["iops"] = rate
            if misses is None:
                sample.error = f"there is no epoch of {PENSTOCK} to count the misses of"
            else:
                sample.seconds = misses / rate
        except (FioError, OSError) as error:
            sample.error = str(error)
        self._results.samples.append(sample)

    def _best(self) -> tuple[int, int] | None:
        rates: dict[tuple[int, int], float] = {}
        for setting in itertools.product(_DEPTHS, _JOBS):
            try:
                rates[setting] = self._rate(setting)
            except (FioError, OSError) as error:
                self._results.samples.append(Sample(FIO, 0, error=str(error)))
                return None
        self._results.fio = {
            f"depth {depth}, jobs {jobs}": rate for (depth, jobs), rate in rates.items()
        }
        return max(rates, key=lambda setting: rates[setting])

    def _rate(self, setting: tuple[int, int]) -> float:
        """Random reads of 4 KiB a second, of the rows of papers."""
        depth, jobs = setting
        path, offset, nbytes = files.file_of(self._place, "paper")
        settle(self._place)
        command = ["fio", "--name=rows", f"--filename={path}", "--rw=randread", "--bs=4096"]
        command += [f"--offset={offset}", f"--size={nbytes}", "--direct=1", "--readonly"]
        command += ["--ioengine=io_uring", f"--iodepth={depth}", f"--numjobs={jobs}"]
        command += ["--group_reporting", "--norandommap=1", "--time_based=1", "--iomem_align=2m"]
        command += [f"--runtime={self._fio_seconds}", "--output-format=json"]
        return float(fio.job(command)["read"]["iops"])


if __name__ == "__main__":
    main()
