"""`penstock import DIRECTORY PATH`: makes a checkpoint of existing safetensors files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import penstock
from penstock.cli.examples import example
from penstock.cli.keys.given import optional_recipient_option, sealed_for
from penstock.common.console import PATH, console, json_option, print_json, progress_bar, size

if TYPE_CHECKING:
    from pathlib import Path

JSON_KEYS = """\b
JSON: path (of the checkpoint), checkpoint_id, tensors, linked_bytes (of files
  that were linked), bytes (written), seconds.
"""


@click.command("import", epilog=example("penstock import base-model run/base", after=JSON_KEYS))
@click.argument("directory", type=PATH)
@click.argument("path", type=PATH)
@click.option("--key", default="model", show_default=True, help="Name of the tensors in the state.")
@click.option("--step", type=int, help="The training step to record.")
@optional_recipient_option
@json_option
def import_(
    directory: Path,
    path: Path,
    key: str,
    step: int | None,
    recipients: tuple[str, ...],
    as_json: bool,
) -> int:
    """Make a checkpoint PATH that links the safetensors files in DIRECTORY.

    The files are read once, for their digests. Changing a file in place damages the checkpoint,
    too. With --recipient the tensors are sealed instead, and no file is linked.
    """
    if not key:
        raise click.UsageError("--key: it must be the name that the state has the tensors under")
    with progress_bar("digesting", hidden=as_json) as update:
        report = penstock.import_model(
            directory,
            path,
            key=key,
            step=step,
            sealing=sealed_for(recipients),
            progress=update,
        )
    if as_json:
        print_json(
            {
                "path": report.path,
                "checkpoint_id": report.checkpoint_id,
                "tensors": report.tensors,
                "linked_bytes": report.linked_bytes,
                "bytes": report.bytes,
                "seconds": report.seconds,
            }
        )
        return 0
    tensors = "tensor" if report.tensors == 1 else "tensors"
    console().print(
        f"{report.path}: {report.tensors:,} {tensors}, {size(report.linked_bytes)} linked, "
        f"{size(report.bytes)} written"
    )
    return 0
