"""`penstock salvage PATH OUT`: saves the intact tensors of a damaged checkpoint to a new one."""

from __future__ import annotations

import dataclasses

import click

import penstock
from penstock.checkpoint.loading.path_kind import check_unsealing, is_sealed
from penstock.cli.examples import example
from penstock.cli.keys.given import (
    identity_option,
    optional_recipient_option,
    sealed_for,
    unseal_option,
)
from penstock.cli.missing import missing_table
from penstock.cli.paths import check_directory
from penstock.common.console import (
    PLACE,
    console,
    json_option,
    print_json,
    progress_bar,
    size,
    summary_table,
)
from penstock.common.file_names import FileNames

ROWS_MAX = 40

RANKS_NAMED_MAX = 8

JSON_KEYS = """\b
JSON: path (of the new one), source, step, checkpoint_id, source_id,
  tensors (saved), tensor_bytes, bytes (of all files), is_partial,
  unverified, values_lost, ranks_lost (ranks whose values are lost),
  seconds, files_lost (small files by name, each with the reason),
  missing: a list of name, dtype, shape, reason,
    rank (its owner; null if ranks share it).
"""


@click.command(
    epilog=example(
        "penstock salvage /checkpoints/step-0000001000 /checkpoints/salvaged", after=JSON_KEYS
    )
)
@click.argument("path", type=PLACE)
@click.argument("out", type=PLACE)
@click.option(
    "--unverified",
    is_flag=True,
    help="If the manifest or parts are lost, also save tensors that no digest verifies.",
)
@optional_recipient_option
@unseal_option
@identity_option
@json_option
def salvage(
    path: str,
    out: str,
    unverified: bool,
    recipients: tuple[str, ...],
    unseal: bool,
    identities: tuple[str, ...],
    as_json: bool,
) -> int:
    """Save the intact tensors of the damaged checkpoint PATH, and its plain values, to OUT.

    The new checkpoint is marked partial and lists what is missing. PATH is not changed. If it is
    sealed, OUT is sealed by --recipient, or clear with --unseal.
    """
    check_directory(path)
    if not recipients and is_sealed(path):
        # Also where the keys come from PENSTOCK_IDENTITIES: it asks for no clear copy.
        check_unsealing(
            path,
            unseal=unseal,
            identities=identities or None,
            unseal_by="--recipient KEY, or --unseal,",
        )
    with progress_bar("salvaging", hidden=as_json) as update:
        report = penstock.salvage(
            path,
            out,
            unverified=unverified,
            sealing=sealed_for(recipients),
            unseal=unseal,
            identities=identities or None,
            progress=update,
        )
    if as_json:
        print_json({**dataclasses.asdict(report), "is_partial": report.is_partial})
    else:
        _print(report)
    return 0


def _print(report: penstock.reports.SalvageReport) -> None:
    out = console()
    made = summary_table(
        ("salvaged", report.source),
        ("into", f"{report.path}, {'partial' if report.is_partial else 'complete'}"),
        ("tensors", f"{report.tensors:,}, {size(report.tensor_bytes)}"),
        ("missing", f"{len(report.missing):,}" if report.missing else "nothing"),
    )
    out.print(made)
    if report.unverified:
        out.print("unverified: nothing proves that they are what was saved", style="yellow")
    if report.values_lost:
        whose = ""
        if any(entry.rank is not None for entry in report.missing):
            named = ", ".join(map(str, report.ranks_lost[:RANKS_NAMED_MAX]))
            rest = len(report.ranks_lost) - RANKS_NAMED_MAX
            whose = f" of rank {named}" + (f" and {rest} more" if rest > 0 else "")
        out.print(f"structure and plain values{whose} are lost", style="yellow")
    for name, reason in report.files_lost.items():
        out.print(f"{name} is not there: {reason}", style="yellow")
    if not report.missing:
        return
    names = FileNames.beside_all(report.source, (entry.reason for entry in report.missing))
    out.print("", missing_table(report.missing[:ROWS_MAX], names.short))
    rest = len(report.missing) - ROWS_MAX
    if rest > 0:
        out.print(f"and {rest:,} more; penstock inspect {report.path} --all lists them")
