"""What `penstock bench checkpoint` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.console import console, table

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.bench.results import Measurement, Rates, Results

_NONE = "-"


def print_results(results: Results) -> None:
    """What was saved, how fast, which way it went, and what there is to say of it."""
    out = console()
    for line in _heading(results):
        out.print(line)
    out.print()
    is_filled = results.settings["fill"] is not None
    out.print(_passes(results) if is_filled else _rates(results))
    out.print(_legend(is_filled=is_filled, has_stall=_has_stall(results)))
    out.print()
    out.print(_proof(results))
    failed = {f"{one.by}: {one.error}" for one in results.measurements if one.error}
    notes = {f"{one.by}: {note}" for one in results.measurements for note in one.notes}
    for line in sorted(failed | notes):
        out.print(line)


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
    has_stall = _has_stall(results)
    numbers = ["save GB/s", "mean", *(["stall s"] if has_stall else []), "load GB/s", "save s"]
    rows = table("writer", *numbers, numbers=numbers, folded=["writer"])
    for by in results.settings["writers"]:
        saved, loaded = results.rates(saves, by), results.rates(loads, by)
        cells = [_ranged(saved), _NONE if saved is None else _short(saved.mean_of_rates)]
        if has_stall:
            stalls = [one.stall_seconds for one in results.of(saves, by)]
            known = [one for one in stalls if one is not None]
            cells.append(f"{np.median(known):.3f}" if known else _NONE)
        slowest = results.spread(saves, by, _seconds)
        cells += [_ranged(loaded), _NONE if slowest is None else _short(slowest.median)]
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


def _proof(results: Results) -> Table:
    """Which way the bytes went: past the page cache or not, how often synced, and by whom."""
    saves, *more = results.cases
    numbers = ["files", "fsyncs", "cached"]
    rows = table("writer", "path", *numbers, "synced by", numbers=numbers, folded=["synced by"])
    for by in results.settings["writers"]:
        saved = results.of(saves, by)
        if not saved:
            continue
        loads = [one for case in more for one in results.of(case, by) if not one.synced_by]
        counted = saved[-1].metadata
        rows.add_row(
            f"{by} (emulated)" if by in results.settings["emulated"] else by,
            "direct" if all(one.is_direct for one in saved) else "buffered",
            str(counted["create"]),
            str(counted["sync"]),
            ", ".join(_cached(some) for some in (saved, loads) if some),
            saved[-1].synced_by,
        )
    return rows


def _seconds(one: Measurement) -> float:
    return one.seconds + one.sync_seconds


def _ranged(rates: Rates | None) -> str:
    if rates is None:
        return _NONE
    return f"{_short(rates.median)} [{_short(rates.least)}, {_short(rates.most)}]"


def _short(value: float) -> str:
    """Three digits or so: rates of fast storage need no hundredths."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _cached(found: list[Measurement]) -> str:
    return f"{max(one.resident_fraction or 0.0 for one in found):.0%}"


def _has_stall(results: Results) -> bool:
    return any(one.stall_seconds is not None for one in results.measurements)


def _legend(*, is_filled: bool, has_stall: bool) -> str:
    """What the columns mean."""
    words = [
        "GB/s: the median of the rounds [slowest, fastest]; mean: of the rates of saves, "
        "as MLPerf Storage publishes it; save s: by its slowest rank"
    ]
    if is_filled:
        words = ["s: mean of the checkpoints of a pass, each by its slowest rank"]
    if has_stall and not is_filled:
        words.append("stall s: what training waits for")
    cached = "after a save" + ("" if is_filled else " and before a load")
    words.append(f"cached: the part of the files in memory {cached}")
    return "; ".join(words) + "."
