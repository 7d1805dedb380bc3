"""`penstock convert SRC DST`: converts a checkpoint of another library."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

import penstock
from penstock.checkpoint.converting.kinds import KINDS, TARGETS
from penstock.checkpoint.loading.path_kind import check_unsealing
from penstock.cli.examples import example
from penstock.cli.keys.given import (
    identity_option,
    optional_recipient_option,
    sealed_for,
    unseal_option,
)
from penstock.common.console import (
    PATH,
    PLACE,
    console,
    json_option,
    print_json,
    progress_bar,
    size,
)

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.checkpoint.converting.kinds import Kind, Target

NAMES_MAX = 10

JSON_KEYS = """\b
JSON: path (of the new one), source, kind, step, checkpoint_id, tensors,
  tensor_bytes, bytes (of all files), seconds,
  trusted: classes that were called to unpickle the source,
  pickled: names of values that are stored as pickled bytes.
"""


@click.command(
    epilog=example(
        "penstock convert runs/last.ckpt runs/converted",
        after=JSON_KEYS,
    )
)
@click.argument("src", type=PATH)
@click.argument("dst", type=PLACE)
@click.option("--from", "kind", type=click.Choice(KINDS), help="Kind of SRC. [default: detected]")
@click.option(
    "--to",
    type=click.Choice(TARGETS),
    default="penstock",
    help="Format of DST: megatron writes what Megatron-Core loads without Penstock.",
    show_default=True,
)
@click.option(
    "--trust",
    is_flag=True,
    help="Unpickle all of SRC, which runs any code that its author has put there.",
)
@click.option("--step", type=click.IntRange(min=0), help="Step to record. [default: that of SRC]")
@click.option("--overwrite", is_flag=True, help="Replace a complete checkpoint DST.")
@optional_recipient_option
@unseal_option
@identity_option
@json_option
def convert(
    src: Path,
    dst: str,
    kind: Kind | None,
    to: Target,
    trust: bool,
    step: int | None,
    overwrite: bool,
    recipients: tuple[str, ...],
    unseal: bool,
    identities: tuple[str, ...],
    as_json: bool,
) -> int:
    """Convert the checkpoint SRC of another library to a Penstock checkpoint DST.

    SRC is a file of torch.save or Lightning, or a directory of PyTorch's Distributed Checkpoint,
    Lightning, DeepSpeed, accelerate or Megatron-Core (torch_dist). It is not changed. With --to
    megatron SRC is a Penstock checkpoint of Megatron-Core, and DST one of its own.
    """
    if to == "megatron":
        opened = identities or None
        check_unsealing(str(src), unseal=unseal, identities=opened, unseal_by="--unseal")
    elif unseal or identities:
        raise click.UsageError("--unseal, --identity: only --to megatron reads a sealed checkpoint")
    with progress_bar("converting", hidden=as_json) as update:
        report = penstock.convert(
            src,
            dst,
            kind=kind,
            to=to,
            trust=trust,
            step=step,
            overwrite=overwrite,
            sealing=sealed_for(recipients),
            unseal=unseal,
            identities=identities or None,
            progress=update,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        _print(report)
    return 0


def _print(report: penstock.reports.Conversion) -> None:
    out = console()
    tensors = "tensor" if report.tensors == 1 else "tensors"
    step = "" if report.step is None else f" at step {report.step}"
    made = "a checkpoint of Megatron-Core" if report.kind == "penstock" else "a checkpoint"
    out.print(
        f"{report.path} is {made} with {report.tensors} {tensors}, "
        f"{size(report.tensor_bytes)}, of {report.source} ({report.kind}{step})"
    )
    for what, names in (
        ("unpickled with", report.trusted),
        ("stored as pickled bytes:", report.pickled),
    ):
        if names:
            more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
            out.print(f"{what} {', '.join(names[:NAMES_MAX])}{more}", style="yellow")
