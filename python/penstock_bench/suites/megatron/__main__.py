"""The command behind `make bench SUITE=megatron`: saves of Megatron-Core, by both formats."""

from __future__ import annotations

import shutil
import statistics
from typing import TYPE_CHECKING, Any

import click

from penstock_bench.harness import memory, tables
from penstock_bench.harness.options import free_port
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample, Samples, quotient
from penstock_bench.results.spread import Spread, spread
from penstock_bench.suites.megatron import worker
from penstock_bench.suites.megatron.checkpoints import LIBRARIES, PENSTOCK, TORCH_DIST

if TYPE_CHECKING:
    from collections.abc import Callable

SYNC, ASYNC = "sync", "async"
SIZES = ("small", "large")
_MIB = 1 << 20
_SHARD_MIB, _QUICK_SHARD_MIB = {"small": 64, "large": 256}, {"small": 4, "large": 8}
_TENSORS = 48
_FEW_TENSORS, _MANY_TENSORS = 16, 4096
_FREE_TIMES_STATE = 6.0
_EXTRA_BYTES_MAX = 256 * _MIB


@suite(
    "megatron",
    LIBRARIES,
    "Who saves",
    preload=["penstock_bench.suites.megatron.worker"],
    timeout_seconds=900.0,
)
@click.option("--ranks", type=click.IntRange(2, 64), default=2, show_default=True)
@click.option("--saves", type=click.IntRange(2), default=3, show_default=True, help="Of a process.")
def main(run: Run, ranks: int, saves: int) -> Report:
    """Save and load with Megatron-Core on gloo ranks, by Penstock and in its own format."""
    shard_mib = _QUICK_SHARD_MIB if run.is_quick else _SHARD_MIB
    settings = {"ranks": ranks, "saves": saves, "shard_mib": shard_mib, "tensors": _TENSORS}
    most = ranks * shard_mib["large"] * _MIB
    turns = [(library, mode) for library in run.names for mode in (SYNC, ASYNC)]
    with run.at_work(_FREE_TIMES_STATE * most, **settings):
        memory.warm(most)
        for index, (library, mode) in run.in_rounds(turns, " ".join):
            _turn(run, library, mode, "large", index)
            if mode == SYNC and library == PENSTOCK:
                _turn(run, library, mode, "small", index)
        exchanged = _exchanged(run, ranks)
    run.results.extra["exchanged"] = exchanged
    found = bars(run.results, exchanged)
    unofficial = "--quick measures small states" if run.is_quick else None
    return Report(
        tables.page(
            run.results,
            _table(run.results),
            *tables.notes(run.results.errors()),
            _exchange_table(exchanged),
            tables.bars(found, unofficial),
        ),
        {"bars": [one.as_json(is_judged=unofficial is None) for one in found]},
    )


def _task(run: Run, library: str, rank: int, ranks: int, port: int, **further: Any) -> worker.Task:
    settings = run.results.settings
    usual = {
        "is_async": False,
        "shard_bytes": settings["shard_mib"]["large"] * _MIB,
        "tensors": _TENSORS,
        "saves": settings["saves"],
    }
    return worker.Task(
        library=library,
        rank=rank,
        ranks=ranks,
        port=port,
        directory=str(run.place / "checkpoints"),
        **(usual | further),
    )


def _turn(run: Run, library: str, mode: str, size: str, index: int) -> None:
    """Saves some times in new processes, and loads."""
    ranks, port = run.results.settings["ranks"], free_port()
    shard_bytes = run.results.settings["shard_mib"][size] * _MIB
    tasks = [
        _task(run, library, rank, ranks, port, is_async=mode == ASYNC, shard_bytes=shard_bytes)
        for rank in range(ranks)
    ]
    outcomes = _children(run, worker.run, tasks, (library, mode, size))
    failed = [one for one in outcomes if "error" in one]
    figures = failed[0] if failed else slowest(outcomes)
    run.results.add(Sample(library, index, f"{mode} {size}"), figures)


def _children(
    run: Run, function: Callable[[Any], dict[str, Any]], tasks: list[worker.Task], cell: object
) -> list[dict[str, Any]]:
    place = run.place / "checkpoints"
    place.mkdir()
    try:
        return run.children(function, tasks, cell)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def slowest(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a turn: of each save the rank that took longest, or most memory."""
    durable, call, peak = (
        [max(one) for one in zip(*(rank[name] for rank in outcomes), strict=True)]
        for name in ("durable", "call", "peak_bytes")
    )
    return {
        "nbytes": outcomes[0]["nbytes"],
        "seconds": statistics.median(durable[1:]),
        "first_seconds": durable[0],
        "call_seconds": statistics.median(call[1:]),
        "peak_bytes": max(peak),
        "load_seconds": max(rank["load_seconds"] for rank in outcomes),
    }


def _exchanged(run: Run, ranks: int) -> list[dict[str, Any]]:
    """The bytes that ranks exchange in a save of few and of many tensors of the same size."""
    found = []
    pairs = [(name, count) for name in run.names for count in (_FEW_TENSORS, _MANY_TENSORS)]
    for library, tensors in run.each(pairs, lambda one: f"{one[0]}: bytes between ranks"):
        port = free_port()
        shard_bytes = _MANY_TENSORS * 4096
        tasks = [
            _task(run, library, rank, ranks, port, shard_bytes=shard_bytes, tensors=tensors)
            for rank in range(ranks)
        ]
        outcomes = _children(run, worker.measure_exchange, tasks, (library, tensors))
        entry: dict[str, Any] = {"library": library, "tensors": tensors}
        failed = [one for one in outcomes if "error" in one]
        if failed:
            entry |= failed[0]
        else:
            names = ("first_received_bytes", "received_bytes")
            entry |= {name: sum(one[name] for one in outcomes) for name in names}
        found.append(entry)
    return found


def bars(results: Samples[Any], exchanged: list[dict[str, Any]]) -> list[tables.Bar]:
    """The ratios that the plug-in holds itself to."""
    large = {mode: f"{mode} large" for mode in (SYNC, ASYNC)}

    def against(figure: str, mode: str) -> Spread | None:
        return results.ratio(PENSTOCK, TORCH_DIST, figure=figure, operation=large[mode])

    def first(library: str) -> Spread | None:
        where = {"operation": large[SYNC]}
        return quotient(
            results.values(library, "first_seconds", **where),
            results.values(library, "seconds", **where),
        )

    def peak(size: str) -> Spread | None:
        peaks = results.values(PENSTOCK, "peak_bytes", operation=f"{SYNC} {size}").values()
        return spread(one / _EXTRA_BYTES_MAX for one in peaks)

    def ceiling(title: str, found: Spread | None, bar: float | None) -> tables.Bar:
        return tables.Bar(title, found, bar, is_ceiling=True)

    received = {
        one["tensors"]: one["received_bytes"]
        for one in exchanged
        if one["library"] == PENSTOCK and "error" not in one
    }
    growth = None
    if received.keys() >= {_FEW_TENSORS, _MANY_TENSORS} and received[_FEW_TENSORS]:
        growth = spread([received[_MANY_TENSORS] / received[_FEW_TENSORS]])
    return [
        ceiling("durable save / torch_dist", against("seconds", SYNC), 0.4),
        ceiling("first save / later saves", first(PENSTOCK), 1.3),
        ceiling("first save / later saves, torch_dist", first(TORCH_DIST), None),
        ceiling("first save / torch_dist", against("first_seconds", SYNC), None),
        ceiling("save in the background, durable / torch_dist", against("seconds", ASYNC), 0.5),
        ceiling("call of a save in the background / torch_dist",
                against("call_seconds", ASYNC), 1.0),
        ceiling("cold load / torch_dist", against("load_seconds", SYNC), 0.6),
        *(ceiling(f"extra host memory / 256 MiB, {one} shards", peak(one), 1.0) for one in SIZES),
        ceiling(f"bytes between ranks, {_MANY_TENSORS} / {_FEW_TENSORS} tensors", growth, 1.1),
    ]  # fmt: skip


_FIGURES = {
    "first_seconds": "first\nsave s",
    "seconds": "later\nsaves s",
    "call_seconds": "call s",
    "load_seconds": "cold\nload s",
}


def _table(results: Samples[Any]) -> Any:
    rows = {}
    for row in results.rows:
        for operation in dict.fromkeys(one.operation for one in results.samples if one.row == row):
            where = {"operation": operation}
            extra = results.spread(row, lambda one: one.detail["peak_bytes"] / _MIB, **where)
            rows[f"{row}, {operation}"] = [
                *(tables.cell(results.spread(row, name, **where)) for name in _FIGURES),
                tables.cell(extra, ".0f"),
            ]
    settings = results.settings
    title = (
        f"{settings['ranks']} ranks, shards of {settings['shard_mib']} MiB each, "
        f"{settings['rounds']} interleaved rounds: median [least, most]"
    )
    return tables.figures(title, [*_FIGURES.values(), "extra\nMiB"], rows, bold=PENSTOCK)


def _exchange_table(exchanged: list[dict[str, Any]]) -> Any:
    names = ("first_received_bytes", "received_bytes")
    rows = {
        f"{one['library']}, {one['tensors']} tensors": [
            f"{one[name]:,}" if name in one else one.get("error", "") for name in names
        ]
        for one in exchanged
    }
    title = "Bytes between all ranks in one save of a strategy, by the kernel's count"
    return tables.figures(title, ["first save", "second save"], rows)


if __name__ == "__main__":
    main()
