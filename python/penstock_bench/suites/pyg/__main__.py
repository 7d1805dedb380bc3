"""The command behind `make bench SUITE=pyg`."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import TYPE_CHECKING

import click

from penstock.common.machine.limits import LimitError, limited
from penstock.common.machine.quiesce import quiesce
from penstock.integrations.pyg.synthetic import WIDTH, Igbh
from penstock_bench.harness import fio, storage, tables
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample, Samples, quotient
from penstock_bench.results.spread import Spread, plain, spread
from penstock_bench.suites.pyg import worker
from penstock_bench.suites.pyg.worker import (
    MANY,
    MEMMAP,
    MEMMAP_MANY,
    PENSTOCK,
    SAMPLE,
    TRAIN,
    Task,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

FIO = "fio"
PEERS = (MEMMAP, MEMMAP_MANY)
ROWS = {
    PENSTOCK: "an epoch by GatherLoader: sampled, gathered ahead, trained",
    SAMPLE: "the same neighbourhoods, sampled and nothing else",
    TRAIN: "the same steps, of batches that are in memory",
    FIO: "the rows that penstock read, at the rate of fio's random reads of 4 KiB",
    MEMMAP: "its first batches by PyG's NodeLoader with our sampler, over numpy.memmap",
    MEMMAP_MANY: f"the same with {MANY} processes that sample and gather",
}
_DETAILS = {
    "rows": "rows of features that it is of",
    "hits": "of them in the cache",
    "shared": "on their way for another batch",
    "read_rows": "read",
    "requests": "requests that read them",
    "group_peak_bytes": "bytes that its control group had at most",
}

_SCALE, _QUICK_SCALE = 0.002, 0.0001
_BATCHES, _QUICK_BATCHES = 200, 6
_PEER_BATCHES = 2
_BASE_BYTES = 1 << 30
"""Memory of an epoch beside features: libraries, edges, batches in flight."""
_FREE_TIMES_TABLES = 1.5
_FIO_SECONDS, _QUICK_FIO_SECONDS = 4, 1
_DEPTHS, _JOBS = (32, 64, 128), (1, 2)


@suite(
    "pyg",
    ROWS,
    "What is measured",
    preload=["penstock_bench.suites.pyg.worker"],
    timeout_seconds=1200.0,
)
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
def main(
    run: Run,
    *,
    scale: float | None,
    ordered: bool,
    batches: int | None,
    peer_batches: int,
    batch_size: int,
    fan_out: str,
    cache_share: float,
    memory_share: float,
    **rest: int,
) -> Report:
    """An epoch of a graph network whose features are on storage, with memory limited."""
    made = Igbh(scale or (_QUICK_SCALE if run.is_quick else _SCALE), is_permuted=not ordered)
    table_bytes = sum(made.nodes.values()) * WIDTH * 4
    task = Task(
        kind="",
        place="",
        group=None,
        seed=0,
        batches=batches or (_QUICK_BATCHES if run.is_quick else _BATCHES),
        batch_size=batch_size,
        fan_out=tuple(int(one) for one in fan_out.split(",")),
        cache_bytes=int(table_bytes * cache_share),
        **rest,
    )
    run.results.settings |= {
        **dataclasses.asdict(task),
        "peer_batches": min(peer_batches, task.batches),
        "scale": made.scale,
        "is_permuted": made.is_permuted,
        "table_bytes": table_bytes,
        "memory_bytes": _BASE_BYTES + int(table_bytes * memory_share),
    }
    with run.at_work(_FREE_TIMES_TABLES * table_bytes) as place:
        _measure(run, dataclasses.replace(task, place=str(place)), made)
    results = run.results
    return Report(
        _tables(results),
        {
            "seconds": {row: plain(results.spread(row)) for row in ROWS},
            "bound_ratio": plain(bound_ratio(results)),
            "peer_ratios": {row: plain(peer_ratio(results, row)) for row in PEERS},
        },
    )


def _measure(run: Run, task: Task, made: Igbh) -> None:
    """Writes the files, finds fio's best setting, then measures in rounds."""
    worker.write(run.place, made, run.say)
    run.say("fio")
    best = _best(run) if FIO in run.names else None
    names = [name for name in run.names if name != FIO]
    # fio's rate is held against the misses of the epoch of its round, so fio ends the round.
    for index, name in run.in_rounds(names, last=[] if best is None else [FIO]):
        if name != FIO:
            _epoch(run, task, name, index)
        elif best is not None:
            _bound(run, best, index)


def _epoch(run: Run, task: Task, name: str, index: int) -> None:
    quiesce(run.place)
    storage.drop([path for path in run.place.rglob("*") if path.is_file()])
    settings = run.results.settings
    batches = settings["peer_batches" if name in PEERS else "batches"]
    task = dataclasses.replace(task, kind=name, seed=index, batches=batches)
    try:
        with limited(settings["memory_bytes"]) as group:
            found = run.child(worker.run, dataclasses.replace(task, group=str(group.processes)))
            found["group_peak_bytes"] = group.peak_bytes
    except LimitError as error:
        found = {"error": f"memory cannot be limited: {error}"}
    run.results.add(Sample(name, index), found)


def _bound(run: Run, setting: tuple[int, int], index: int) -> None:
    """The misses of the round's epoch, at fio's rate."""
    sample = Sample(FIO, index)
    misses = run.results.values(PENSTOCK, "read_rows").get(index)
    try:
        rate = sample.detail["iops"] = _rate(run, setting)
        if misses is None:
            sample.error = f"there is no epoch of {PENSTOCK} to count the misses of"
        else:
            sample.seconds = misses / rate
    except FioError as error:
        sample.error = str(error)
    run.results.samples.append(sample)


def _best(run: Run) -> tuple[int, int] | None:
    rates: dict[tuple[int, int], float] = {}
    for setting in itertools.product(_DEPTHS, _JOBS):
        try:
            rates[setting] = _rate(run, setting)
        except FioError as error:
            run.results.samples.append(Sample(FIO, 0, error=str(error)))
            return None
    run.results.extra["fio"] = {
        f"depth {depth}, jobs {jobs}": rate for (depth, jobs), rate in rates.items()
    }
    return max(rates, key=lambda setting: rates[setting])


def _rate(run: Run, setting: tuple[int, int]) -> float:
    """Random reads of 4 KiB a second, of the rows of papers."""
    depth, jobs = setting
    path, offset, nbytes = worker.file_of(run.place, "paper")
    quiesce(run.place)
    command = fio.command(
        filename=path, offset=offset, size=nbytes, readonly=True, rw="randread", bs=4096,
        iodepth=depth, numjobs=jobs, group_reporting=True, norandommap=1, time_based=1,
        runtime=_QUICK_FIO_SECONDS if run.is_quick else _FIO_SECONDS,
    )  # fmt: skip
    return float(fio.job(command)["read"]["iops"])


def bounds(results: Samples[Sample]) -> dict[int, tuple[str, float]]:
    """The longest part of an epoch by round, which no epoch can be faster than."""
    parts = {row: results.values(row) for row in (SAMPLE, TRAIN, FIO)}
    rounds = set.intersection(*(set(one) for one in parts.values()))
    return {
        index: max(((row, one[index]) for row, one in parts.items()), key=lambda part: part[1])
        for index in sorted(rounds)
    }


def bound_ratio(results: Samples[Sample]) -> Spread | None:
    """An epoch as a multiple of its longest part."""
    longest = {index: seconds for index, (_, seconds) in bounds(results).items()}
    return quotient(results.values(PENSTOCK), longest)


def peer_ratio(results: Samples[Sample], peer: str) -> Spread | None:
    """How many times as long a peer takes as Penstock for the same batches, within a round."""
    ours = {one.round_index: one for one in results.good(PENSTOCK)}
    return spread(
        one.seconds / ours[one.round_index].detail["at"][len(one.detail["at"]) - 1]
        for one in results.good(peer)
        if one.round_index in ours
    )


def differing(results: Samples[Sample]) -> list[str]:
    """The peers whose losses of the same batches are not those of Penstock."""
    ours = {one.round_index: one.detail["losses"] for one in results.good(PENSTOCK)}
    return [
        f"{one.row}: other losses in round {one.round_index + 1}"
        for peer in PEERS
        for one in results.good(peer)
        if ours.get(one.round_index, [])[: len(one.detail["losses"])] != one.detail["losses"]
    ]


def _tables(results: Samples[Sample]) -> Group:
    told = results.settings
    sizes = {name: f"{told[f'{name}_bytes'] / 1e9:.2f} GB" for name in ("table", "cache", "memory")}
    epochs = tables.figures(
        f"{told['batches']} batches of {told['batch_size']} papers, fan-out {told['fan_out']},"
        f" {sizes['table']} of features, cache {sizes['cache']}, memory {sizes['memory']},"
        f" {told['rounds']} interleaved rounds, median [least, most]",
        ["seconds", "of the processor"],
        {
            row: [
                tables.cell(results.spread(row)),
                tables.cell(results.spread(row, "cpu_seconds") if row != FIO else None),
            ]
            for row in ROWS
        },
    )
    counts = [(words, results.spread(PENSTOCK, name)) for name, words in _DETAILS.items()]
    counts.append(("random reads of 4 KiB a second, by fio", results.spread(FIO, "iops")))
    details = tables.figures(
        None,
        ["median [least, most]"],
        {words: [tables.cell(found, ",.0f")] for words, found in counts if found},
        first=f"of an epoch by {PENSTOCK}",
    )
    failed = [*results.errors(), *differing(results)]
    return tables.page(results, epochs, *tables.notes(failed, ROWS), details, _ratios(results))


def _ratios(results: Samples[Sample]) -> Table:
    longest = Counter(row for row, _ in bounds(results).values())
    caption = tables.WITHIN
    if longest:
        told = ", ".join(f"{row} in {count}" for row, count in longest.most_common())
        caption += f" The longest part: {told} rounds."
    title = f"{PENSTOCK} / max({SAMPLE}, {TRAIN}, misses / IOPS), bar <= 1.10"
    found = [(title, bound_ratio(results))]
    batches = results.settings["peer_batches"]
    for row in PEERS:
        title = f"{row} / {PENSTOCK}, {batches} batches, bar >= 10"
        found.append((title, peer_ratio(results, row)))
    return tables.ratios(found, caption=caption)


if __name__ == "__main__":
    main()
