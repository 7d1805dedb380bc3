"""`penstock salvage PATH OUT`: the intact tensors of a damaged checkpoint, in a new one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

import penstock
from penstock.cli.console import (
    PATH,
    console,
    json_option,
    print_json,
    progress_bar,
    shape,
    size,
    table,
)

if TYPE_CHECKING:
    from pathlib import Path

ROWS_MAX = 40

JSON_KEYS = """\b
JSON: path (of the new one), source, step, checkpoint_id, source_id,
  tensors (taken over), tensor_bytes, bytes (of all files), is_partial,
  unverified, values_lost, seconds,
  missing: a list of name, dtype, shape, reason.
"""


@click.command(epilog=JSON_KEYS)
@click.argument("path", type=PATH)
@click.argument("out", type=PATH)
@click.option(
    "--unverified",
    is_flag=True,
    help="Where manifest or part are lost, take over what nothing vouches for.",
)
@json_option
def salvage(path: Path, out: Path, unverified: bool, as_json: bool) -> int:
    """Save the intact tensors of the damaged checkpoint PATH, and its plain values, to OUT.

    The new checkpoint is marked partial and lists what is missing. PATH is not changed.
    """
    with progress_bar("salvaging", hidden=as_json) as update:
        report = penstock.salvage(path, out, unverified=unverified, progress=update)
    if as_json:
        print_json({**dataclasses.asdict(report), "is_partial": report.is_partial})
    else:
        _print(report)
    return 0


def _print(report: penstock.SalvageReport) -> None:
    out = console()
    kind = "a partial" if report.is_partial else "a complete"
    tensors = "tensor" if report.tensors == 1 else "tensors"
    out.print(
        f"{report.path} is {kind} checkpoint with {report.tensors} {tensors}, "
        f"{size(report.tensor_bytes)}"
    )
    if report.unverified:
        out.print("unverified: nothing proves that they are what was saved", style="yellow")
    if report.values_lost:
        out.print("structure and plain values are lost", style="yellow")
    if not report.missing:
        return
    rows = table("missing", "dtype", "shape", "reason", folded=["missing", "shape", "reason"])
    for missing in report.missing[:ROWS_MAX]:
        rows.add_row(missing.name, missing.dtype, shape(missing.shape), missing.reason)
    out.print("", rows)
    if len(report.missing) > ROWS_MAX:
        out.print(f"{ROWS_MAX} of {len(report.missing)}; penstock inspect shows all", style="dim")
