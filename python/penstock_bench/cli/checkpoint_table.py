"""The tables of `penstock bench checkpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.common.console import console, table
from penstock_bench.cli.outputs import print_headlines, print_remarks
from penstock_bench.suites.checkpoint import figures

if TYPE_CHECKING:
    from rich.table import Table

    from penstock_bench.results.results import Measurement, Rates, Results

_NONE = "-"


def print_results(results: Results) -> None:
    """Prints the state, the rates, the path of the bytes, and notes."""
    out = console()
    print_headlines(results)
    for line in _heading(results):
        out.print(line)
    out.print()
    is_filled = results.settings["fill"] is not None
    out.print(_passes(results) if is_filled else _rates(results))
    out.print(_legend(results))
    out.print()
    if costs := figures.sealed(results):
        out.print(_sealed(costs))
        out.print("Within a round, the median [least, most]; +s: processor time more, s/GB.")
        out.print()
    out.print(_proof(results))
    print_remarks(results)


def _heading(results: Results) -> list[str]:
    settings = results.settings
    scale, layout, ranks = settings["scale"], settings["layout"], settings["ranks"]
    shape = f"tp {layout['tp']}, pp {layout['pp']}, dp {layout['dp']}, ZeRO {layout['zero']}"
    taking = f"{len(ranks)} of {settings['world_size']} ranks"
    if 1 < len(ranks) < settings["world_size"] <= 64:
        taking = f"ranks {', '.join(map(str, ranks))} of {settings['world_size']}"
    lines = [
        f"{settings['name']}: {scale['bytes'] / 1e9:.3f} GB, {taking} ({shape})",
        f"scale {scale['factor']:.3g} of {scale['full_bytes'] / 1e9:,.1f} GB: {scale['how']}",
    ]
    if not settings["syncs"]:
        lines.append("not synced, but for what writers sync by themselves")
    if not settings["has_one_clock"]:
        lines.append("on several machines: each rank's time begins when it leaves a barrier")
    return lines


def _rates(results: Results) -> Table:
    saves, loads = results.cases
    has_stall, has_spread = bool(figures.behind(results)), results.settings["rounds"] > 1
    waits = figures.waits(results)
    means, stalls = ["mean"] * has_spread, ["wait s"] * has_stall
    numbers = ["save GB/s", *means, "load GB/s", "save s", *stalls]
    rows = table("writer", *numbers, numbers=numbers, folded=["writer"])
    for by in results.settings["writers"]:
        written, loaded = results.rates(saves, by), results.rates(loads, by)
        cells = [_ranged(written)]
        if has_spread:
            cells.append(_NONE if written is None else _short(written.mean_of_rates))
        slowest = results.spread(saves, by, _seconds)
        cells += [_ranged(loaded), _NONE if slowest is None else _short(slowest.median)]
        if has_stall:
            cells.append(f"{np.median(waits[by]):.3f}" if by in waits else _NONE)
        rows.add_row(by, *cells)
    return rows


def _passes(results: Results) -> Table:
    passes = list(results.cases)
    numbers = [f"pass {index + 1} s" for index in range(len(passes))]
    numbers += ["checkpoints", "GB/s"]
    rows = table("writer", *numbers, numbers=numbers, folded=["writer", "checkpoints"])
    for by in results.settings["writers"]:
        found = [results.of(case, by) for case in passes]
        cells = [
            _short(float(np.mean([*map(_seconds, some)]))) if some else _NONE for some in found
        ]
        cells.append(" + ".join(str(len(some)) for some in found))
        written = [one for some in found for one in some]
        rates = [one.durable_gb_per_second for one in written]
        cells.append(_short(float(np.median(rates))) if rates else _NONE)
        rows.add_row(by, *cells)
    return rows


def _sealed(costs: dict[str, figures.Sealed]) -> Table:
    """A table of the costs of sealing."""
    numbers = ["save", "load", "save +s", "load +s", "wait"]
    rows = table("sealed / clear", *numbers, numbers=numbers, folded=["sealed / clear"])
    for by, cost in costs.items():
        ratios = (_NONE if one is None else one.with_range(".2f") for one in (cost.save, cost.load))
        more = (_NONE if one is None else f"{one.median:.2f}" for one in cost[2:])
        rows.add_row(by, *ratios, *more)
    return rows


def _proof(results: Results) -> Table:
    """Which way the bytes went: past the page cache or not, how often synced, and by whom."""
    saves, *more = results.cases
    numbers = ["files", "fsyncs", "cached"]
    rows = table("writer", "path", *numbers, "synced by", numbers=numbers, folded=["synced by"])
    for by in results.settings["writers"]:
        written = results.of(saves, by)
        if not written:
            continue
        loads = [one for case in more for one in results.of(case, by) if not one.synced_by]
        counted = written[-1].metadata
        rows.add_row(
            f"{by} (emulated)" if by in results.settings["emulated"] else by,
            "direct" if all(one.is_direct for one in written) else "buffered",
            str(counted["create"]),
            str(counted["sync"]),
            ", ".join(_cached(some) for some in (written, loads) if some),
            written[-1].synced_by,
        )
    return rows


def _seconds(one: Measurement) -> float:
    return one.seconds + one.sync_seconds


def _ranged(rates: Rates | None) -> str:
    if rates is None:
        return _NONE
    if rates.least == rates.most:
        return _short(rates.median)
    return f"{_short(rates.median)} [{_short(rates.least)}, {_short(rates.most)}]"


def _short(value: float) -> str:
    """Three digits or so: rates of fast storage need no hundredths."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _cached(found: list[Measurement]) -> str:
    return f"{max(one.resident_fraction or 0.0 for one in found):.0%}"


def _legend(results: Results) -> str:
    """The meaning of the columns."""
    is_filled = results.settings["fill"] is not None
    words = ["save s: by its slowest rank"]
    if results.settings["rounds"] > 1:
        words = [
            "GB/s: the median of the rounds [slowest, fastest]",
            "mean: of the rates of saves, as MLPerf Storage publishes it",
            *words,
        ]
    if is_filled:
        words = ["s: mean of the checkpoints of a pass, each by its slowest rank"]
    elif figures.behind(results):
        words.append("wait s: what training waits for it")
    cached = "after a save" + ("" if is_filled else " and before a load")
    words.append(f"cached: the part of the files in memory {cached}")
    return "; ".join(words) + "."
