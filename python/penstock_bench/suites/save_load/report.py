"""The table: one row per contender and way to load, medians with their range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock_bench.peers.save_load import CONTENDERS
from penstock_bench.suites.save_load.runner import FIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from penstock_bench.suites.save_load.bars import Verdict
    from penstock_bench.suites.save_load.results import Results, Sample, Spread

MIB = 1 << 20

# The share of the processors that others may have before the numbers are called in question.
_OTHERS_WORK_MAX = 0.1


def render(results: Results, verdicts: list[Verdict]) -> RenderableType:
    """Everything that a run shows."""
    parts: list[RenderableType] = [_heading(results)]
    for state in results.states:
        if results.rows(state):
            parts += [Text(), _table(results, state), *_footnotes(results, state)]
    if verdicts:
        parts += [Text(), _bars(verdicts, results)]
    return Group(*parts)


def describe(machine: dict[str, Any], disk: dict[str, Any]) -> list[str]:
    """What the numbers belong to: the first lines of every report."""
    queue = disk["queue"]
    alignment = disk["direct_io_alignment"] or {}
    return [
        f"{machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['virtual'] or 'bare metal'}; "
        f"Linux {machine['kernel']}, {machine['system']}",
        f"{disk['file_system']} on {disk['device']} ({disk['mount_options']}), "
        f"scheduler {queue.get('scheduler', '?')}, write cache {queue.get('write_cache', '?')}, "
        f"direct I/O alignment {alignment.get('memory_bytes', '?')}"
        f"/{alignment.get('offset_bytes', '?')} bytes; {disk['directory']}",
    ]


def with_range(found: Spread, form: str) -> str:
    """A median with the range around it."""
    return f"{found.median:{form}} [{found.least:{form}}, {found.most:{form}}]"


def _heading(results: Results) -> Text:
    lines = [
        *describe(results.machine, results.disk),
        f"interleaved rounds: {results.settings['rounds']}; median [least, most]; GB is 10^9 bytes "
        "of tensors; saves synced, loads cold and in memory of their own",
    ]
    best = results.fio.get("best")
    if best:
        lines.append(f"fio writes with {best['save']}, reads with {best['load']}")
    problem = results.fio.get("error")
    text = Text("\n".join(lines))
    if problem:
        text.append(f"\nNO COMPARISON WITH fio: {problem}", style="bold red")
    return text


def _table(results: Results, state: str) -> Table:
    about = results.states[state]
    title = f"{state}: {about['description']}; {about['bytes'] / 1e9:.2f} GB"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for heading in (
        "save GB/s",
        "load GB/s",
        "CPU s/GB\nsave",
        "CPU s/GB\nload",
        "of machine\nsave",
        "of machine\nload",
        "extra MiB\nsave",
        "extra MiB\nload",
        "disk /\nstate",
    ):
        table.add_column(heading, justify="right")

    def speed(row: str) -> float:
        found = results.spread(state, row, "save", lambda one: one.gb_per_second)
        return -found.median if found else 0.0

    base = sorted({row.partition(":")[0] for row in results.rows(state)}, key=speed)
    order = [row for name in base for row in results.rows(state) if row.partition(":")[0] == name]
    for row in order:
        style = "bold" if row == "penstock" else "cyan" if row == FIO else ""
        table.add_row(row, *_cells(results, state, row), style=style)
    return table


def _cells(results: Results, state: str, row: str) -> list[str]:
    def cell(operation: str, value: Callable[[Sample], float | None], form: str) -> str:
        found = results.spread(state, row, operation, value)
        if found:
            return with_range(found, form) if form == ".3g" else f"{found.median:{form}}"
        failed = any(
            sample.error
            for sample in results.samples
            if (sample.state, sample.row, sample.operation) == (state, row, operation)
        )
        return "FAILED" if failed and form == ".3g" else "-"

    def disk(sample: Sample) -> float | None:
        return sample.disk_bytes / sample.state_bytes if sample.disk_bytes else None

    def extra(sample: Sample) -> float | None:
        return None if sample.extra_bytes is None else sample.extra_bytes / MIB

    def machine_cpu(sample: Sample) -> float | None:
        return sample.machine_cpu_seconds_per_gb or None

    return [
        cell("save", lambda one: one.gb_per_second, ".3g"),
        cell("load", lambda one: one.gb_per_second, ".3g"),
        cell("save", lambda one: one.cpu_seconds_per_gb, ".3f"),
        cell("load", lambda one: one.cpu_seconds_per_gb, ".3f"),
        cell("save", machine_cpu, ".3f"),
        cell("load", machine_cpu, ".3f"),
        cell("save", extra, ".0f"),
        cell("load", extra, ".0f"),
        cell("save", disk, ".3f"),
    ]


def _footnotes(results: Results, state: str) -> list[RenderableType]:
    notes: list[RenderableType] = []
    for row in results.rows(state):
        notes += [
            Text(f"  {row} FAILED, {error}", style="bold red")
            for error in results.errors(state, row)
        ]
    for row in results.rows(state):
        entry = CONTENDERS.get(row)
        if entry and entry.note and results.good(state, row, "save"):
            version = results.machine["versions"].get(entry.package)
            notes.append(Text(f"  {row} ({entry.package} {version}): {entry.note}"))
    notes += [Text(f"  {line}", style="yellow") for line in _doubts(results, state)]
    return notes


def _doubts(results: Results, state: str) -> list[str]:
    """What a reader has to know before believing the numbers."""
    doubts = []
    samples = [one for one in results.samples if one.state == state and one.error is None]
    warm = [one for one in samples if (one.resident_fraction or 0.0) > 0.001]
    if warm:
        worst = max(one.resident_fraction or 0.0 for one in warm)
        rows = ", ".join(dict.fromkeys(one.row for one in warm))
        doubts.append(f"up to {worst:.1%} of the files was still cached before loads of {rows}")
    # Loads alone: during saves the kernel's write-back, which is nobody's, looks like others' work.
    shares = [
        (one.machine_cpu_seconds - one.cpu_seconds) / one.seconds / results.machine["cores"]
        for one in samples
        if one.operation == "load" and one.machine_cpu_seconds
    ]
    if shares and np.median(shares) > _OTHERS_WORK_MAX:
        doubts.append(
            f"THE MACHINE WAS BUSY: {np.median(shares):.0%} of its processors' time during loads "
            "went to other work"
        )
    if any(one.dropped == "fadvise" for one in samples):
        doubts.append("not root: caches dropped with posix_fadvise alone")
    for row in ("penstock", "penstock-threads", "penstock-buffered"):
        for one in results.good(state, row, "save")[:1]:
            report = one.detail
            doubts.append(
                f"{row} ran with engine {report['engine']}, direct I/O "
                f"{'on' if report['direct_io'] else 'off'}, {report['io_threads']} threads x "
                f"{report['queue_depth']} x {report['extent_bytes'] // MIB} MiB"
                + "".join(f"; {reason}" for reason in report["fallbacks"])
            )
    return doubts


def _bars(verdicts: list[Verdict], results: Results) -> Table:
    caption = "Ratios within a round, then their median."
    is_official = results.settings["is_official"]
    if not is_official:
        caption += " Not judged: the bars are for a Llama state of 4 GiB."
    table = Table(title="Bars", title_justify="left", title_style="bold", caption=caption)
    table.add_column("state")
    table.add_column("ratio")
    for heading in ("median [least, most]", "bar", "aim", ""):
        table.add_column(heading, justify="right")
    for one in verdicts:
        is_met = one.is_met if is_official else None
        sign = "<=" if one.is_ceiling else ">="
        table.add_row(
            one.state,
            one.title,
            with_range(one.found, ".3f") if one.found else "not measured",
            f"{sign} {one.bar:g}" if one.bar is not None else "",
            f"{one.aim:g}" if one.aim is not None else "",
            {None: "", True: "met", False: "MISSED"}[is_met],
            style={None: "dim" if one.found is None else "", True: "green", False: "bold red"}[
                is_met
            ],
        )
    return table
