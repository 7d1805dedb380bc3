"""`penstock trace phases`: shows the phases of a training run of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli.examples import example
from penstock.common.console import PATH, console, json_option, print_json, size, table
from penstock.common.tracing import phases, recorded

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from penstock.common.tracing.phases import PhaseOfRun


@click.command("phases", epilog=example("penstock trace phases trace.rank0.json trace.rank1.json"))
@click.argument("files", type=PATH, nargs=-1, required=True)
@json_option
def trace_phases(files: tuple[Path, ...], as_json: bool) -> int:
    """Show the phases of a training run: FILES are the traces of all its ranks.

    Start-up ends with the last load before the first save. In checkpoint, training waits for a
    save; in load, it waits for another call of Penstock. Compute is the rest. In background, a
    save runs beside training. The first table shows each phase's share of the time, the bytes and
    rates of all ranks together, and how many ranks read and wrote. The second table shows
    Penstock's requests by size. JSON: processes, phases.
    """
    found = phases.phases([recorded.read(file) for file in files])
    if as_json:
        print_json({"processes": len(files), "phases": plain(found)})
        return 0
    out = console()
    out.print(phase_table(found))
    out.print(request_table(found))
    return 0


def plain(found: list[PhaseOfRun]) -> list[dict[str, Any]]:
    """The phases as JSON."""
    return [
        {
            **one._asdict(),
            "read_rate": one.read_rate,
            "write_rate": one.write_rate,
            "requests": [kind._asdict() for kind in one.requests],
        }
        for one in found
    ]


def phase_table(found: list[PhaseOfRun]) -> Table:
    """The time, the bytes and the active ranks of each phase."""
    numbers = ["times", "seconds", "share", "read", "a s", "ranks", "written", "per s", "by ranks"]
    rows = table("phase", *numbers, numbers=numbers, folded=["phase"])
    for one in found:
        rows.add_row(
            one.name, str(one.times), f"{one.seconds:.2f}", f"{one.share:.1%}",
            size(round(one.read_bytes)), size(round(one.read_rate)), str(one.readers),
            size(round(one.written_bytes)), size(round(one.write_rate)), str(one.writers),
        )  # fmt: skip
    return rows


def request_table(found: list[PhaseOfRun]) -> Table:
    """The requests of each phase by size."""
    numbers = ["count", "bytes", "mean", "p50 ms", "max ms"]
    rows = table("phase", "requests", *numbers, numbers=numbers, folded=["requests"])
    for one in found:
        for kind in one.requests:
            rows.add_row(
                one.name, f"{kind.operation} {kind.size}", f"{kind.requests:,}", size(kind.nbytes),
                size(round(kind.nbytes / kind.requests)), f"{kind.p50_ms:.2f}",
                f"{kind.max_ms:.1f}",
            )  # fmt: skip
    return rows
