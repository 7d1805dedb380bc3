"""`penstock trace summary`: shows where the time of traced saves and loads went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli.examples import example
from penstock.common.console import PATH, console, json_option, print_json, size, table
from penstock.common.tracing import recorded, summary

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from penstock.common.tracing.recorded import Request, Trace

_MOMENTS = 20
_SLOWEST = 5
_TAIL_REQUESTS_MIN = 1000
"""Least requests for a 99th percentile: ten are beyond it, as in the benchmarks' tables."""


@click.command(
    "summary",
    epilog=example(
        "penstock trace summary trace.json",
        after="A trace opens in https://ui.perfetto.dev as well.",
    ),
)
@click.argument("files", type=PATH, nargs=-1, required=True)
@json_option
def trace_summary(files: tuple[Path, ...], as_json: bool) -> int:
    """Show where the time went in FILES, one per process.

    For several files it prints a line of each. For one it prints the calls and their phases, the
    threads' work, the requests by size, the slowest requests, and the bytes read and written over
    time. JSON: traces, a list with the same for each file.
    """
    traces = [(file, recorded.read(file)) for file in files]
    if as_json:
        print_json({"traces": [_plain(file, one) for file, one in traces]})
        return 0
    out = console()
    if len(traces) > 1:
        _print_all(out, [one for _, one in traces])
        return 0
    for file, one in traces:
        out.print(f"{file}: {one.name}, {one.seconds:.2f} s", style="bold", soft_wrap=True)
        if one.is_cut:
            out.print("The process was ended: what it was in the middle of is missing.")
        if one.lost:
            out.print(f"{one.lost:,} things are missing: the file could not be written in time.")
        _print_calls(out, one)
        _print_work(out, one)
        _print_requests(out, one)
        _print_moments(out, one)
    return 0


def _plain(file: Path, one: Trace) -> dict[str, Any]:
    tail = summary.slowest(one, _SLOWEST)
    return {
        "file": str(file),
        "process": one.name,
        "about": one.about,
        "is_cut": one.is_cut,
        "lost": one.lost,
        "seconds": one.seconds,
        "calls": [call._asdict() for call in summary.calls(one)],
        "work": [work._asdict() for work in summary.work(one)],
        "requests": [kind._asdict() for kind in summary.requests(one.requests)],
        "slowest": [
            {
                "operation": request.operation,
                "milliseconds": request.seconds * 1e3,
                "begin": request.begin,
                "bytes": request.nbytes,
                "offset": request.offset,
                "file": request.file,
            }
            for request in tail
        ],
        "phases": [phase._asdict() for phase in summary.phases(one)],
        "moments": [moment._asdict() for moment in summary.moments(one, _MOMENTS)],
    }


def _print_all(out: Console, traces: list[Trace]) -> None:
    numbers = ["seconds", "saves", "stalled", "loads", "accounted"]
    rows = table("process", *numbers, numbers=numbers, folded=["process"])
    for one in traces:
        calls = summary.calls(one)
        stalls = [call for call in calls if call.role == "stall"]
        loads = sum(call.times for call in stalls if call.name == "load")
        saves = sum(call.times for call in calls if call.name == "save")
        phases = {phase.name: phase.seconds for phase in summary.phases(one)}
        least = min((call.accounted for call in stalls if call.phases), default=1.0)
        name = f"{one.name}, cut" if one.is_cut else one.name
        rows.add_row(
            name, f"{one.seconds:.2f}", str(saves), f"{phases[summary.CHECKPOINT]:.2f}",
            str(loads), f"{least:.0%}",
        )  # fmt: skip
    out.print(rows)
    out.print("More of each: penstock trace summary FILE")


def _print_calls(out: Console, one: Trace) -> None:
    rows = table(
        "call", "phase", "row", "times", "seconds", "share",
        numbers=["times", "seconds", "share"], folded=["phase"],
    )  # fmt: skip
    for call in summary.calls(one):
        accounted = f"{call.accounted:.1%} in phases" if call.phases else ""
        seconds = f"{call.seconds:.3f}"
        rows.add_row(call.name, accounted, call.role, str(call.times), seconds, "", style="bold")
        for name, phase_seconds in call.phases.items():
            share = f"{phase_seconds / call.seconds:.1%}" if call.seconds else ""
            rows.add_row("", name, "", "", f"{phase_seconds:.3f}", share)
    out.print(rows)


def _print_work(out: Console, one: Trace) -> None:
    works = summary.work(one)
    if not works:
        return
    rows = table("threads", "what", "seconds", "share", numbers=["seconds", "share"])
    for work in works:
        rows.add_row(work.role, "", f"{work.seconds:.3f}", "", style="bold")
        for name, seconds in sorted(work.parts.items(), key=lambda part: -part[1]):
            share = f"{seconds / work.seconds:.1%}" if work.seconds else ""
            rows.add_row("", name, f"{seconds:.3f}", share)
    out.print(rows)


def _print_requests(out: Console, one: Trace) -> None:
    kinds = summary.requests(one.requests)
    if not kinds:
        return
    has_tail = any(kind.requests >= _TAIL_REQUESTS_MIN for kind in kinds)
    tail = ["p99"] if has_tail else []
    numbers = ["count", "bytes", "aligned", "direct", "p50", *tail, "max ms"]
    rows = table("requests", *numbers, numbers=numbers, folded=["requests"])
    for kind in kinds:
        p99 = _short_number(kind.p99_ms) if kind.requests >= _TAIL_REQUESTS_MIN else ""
        rows.add_row(
            f"{kind.operation} {kind.size}", f"{kind.requests:,}", size(kind.nbytes),
            f"{kind.aligned:.0%}", f"{kind.direct:.0%}",
            _short_number(kind.p50_ms), *([p99] if has_tail else []), _short_number(kind.max_ms),
        )  # fmt: skip
    out.print(rows)
    rows = table(
        "slowest", "ms", "at s", "bytes", "offset", "file",
        numbers=["ms", "at s", "bytes", "offset"], folded=["file"],
    )  # fmt: skip
    for request in summary.slowest(one, _SLOWEST):
        rows.add_row(
            _operation(request), _short_number(request.seconds * 1e3), f"{request.begin:.3f}",
            f"{request.nbytes:,}", f"{request.offset:,}", _short(request.file),
        )  # fmt: skip
    out.print(rows)


def _short_number(value: float) -> str:
    """A number with three digits, or all digits before the decimal point."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _operation(request: Request) -> str:
    return f"{request.operation} (failed)" if request.has_failed else request.operation


def _short(file: str) -> str:
    """The name of a checkpoint's file without the attempt's id, which means nothing to a reader."""
    parts = file.split(".")
    return ".".join([parts[0], *parts[2:]]) if len(parts) > 2 else file


def _print_moments(out: Console, one: Trace) -> None:
    rows = table(
        "phase", "seconds", "read", "written", numbers=["seconds", "read", "written"]
    )  # fmt: skip
    for phase in summary.phases(one):
        read, written = size(round(phase.read_bytes)), size(round(phase.written_bytes))
        rows.add_row(phase.name, f"{phase.seconds:.3f}", read, written)
    out.print(rows)
    numbers = ["from s", "to s", "read GB/s", "written GB/s"]
    rows = table(*numbers, "mostly", numbers=numbers)
    for moment in summary.moments(one, _MOMENTS):
        length = moment.end - moment.begin
        rows.add_row(
            f"{moment.begin:.2f}", f"{moment.end:.2f}",
            f"{moment.read_bytes / length / 1e9:.3f}",
            f"{moment.written_bytes / length / 1e9:.3f}", moment.phase,
        )  # fmt: skip
    out.print(rows)
