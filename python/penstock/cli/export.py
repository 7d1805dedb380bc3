"""`penstock export PATH [OUT]`: exports a checkpoint's model as a directory that others load."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

import penstock
from penstock.checkpoint.loading.path_kind import check_unsealing
from penstock.cli.examples import example
from penstock.cli.keys.given import identity_option, unseal_option
from penstock.cli.paths import checkpoint_at
from penstock.common.console import (
    PATH,
    PLACE,
    console,
    json_option,
    print_json,
    progress_bar,
    size,
)
from penstock.reports.copies import REMEDY

if TYPE_CHECKING:
    from pathlib import Path

JSON_KEYS = """\b
JSON: path (of the directory), tensors, tensor_bytes, bytes_written, seconds,
  way ("in place", "reflink", "hard link", "copy"), files (weights first),
  missing (what from_pretrained needs beside them).
"""


@click.command(
    epilog=example(
        "penstock export run/steps my-model --files base-model",
        "penstock export run/steps/step-0000001000 my-model --dtype bfloat16",
        after=JSON_KEYS,
    )
)
@click.argument("path", type=PLACE)
@click.argument("out", type=PATH, required=False)
@click.option("--group", help="Name of the group to export, as saved.")
@click.option("--key", help="Dotted name of the model, if it was not saved as a group.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32", "float64"]),
    help="Type for tensors of floating point.",
)
@click.option(
    "--unfuse/--keep-fused",
    default=None,
    help="Split tensors that transformers fuses (experts). [default: if config.json says so]",
)
@click.option(
    "--files",
    type=PATH,
    help="Directory with config.json, tokenizer and the like. [default: those saved with it]",
)
@click.option(
    "--hard-link",
    is_flag=True,
    help="Hard-link the checkpoint's files instead of copying them.",
)
@unseal_option
@identity_option
@click.option("--no-check", is_flag=True, help="Do not compare names with config.json's model.")
@json_option
def export(
    path: str,
    out: Path | None,
    group: str | None,
    key: str | None,
    dtype: str | None,
    unfuse: bool | None,
    files: Path | None,
    hard_link: bool,
    unseal: bool,
    identities: tuple[str, ...],
    no_check: bool,
    as_json: bool,
) -> int:
    """Export the model in PATH as a directory that from_pretrained and others load.

    PATH is a checkpoint, or a store: then its newest complete step. OUT appears complete or not at
    all. Without OUT, model.safetensors.index.json and the small files saved with the checkpoint are
    restored in PATH, for a checkpoint saved with groups={'model': ''}.
    """
    if group is not None and key is not None:
        raise click.UsageError("--group and --key: give one of them")
    chosen = (group, key, dtype, unfuse, files)
    if out is None and (hard_link or any(one is not None for one in chosen)):
        raise click.UsageError("name a directory OUT: in place nothing can be chosen")
    checkpoint, note = checkpoint_at(path)
    check_unsealing(checkpoint, unseal=unseal, identities=identities or None, unseal_by="--unseal")
    if note and not as_json:
        console().print(note, style="dim")
    with progress_bar("exporting", hidden=as_json) as update:
        report = penstock.export(
            checkpoint,
            out,
            group=group,
            key=key,
            dtype=dtype,
            unfuse=unfuse,
            files=files,
            hard_link=hard_link,
            check=not no_check,
            unseal=unseal,
            identities=identities or None,
            progress=update,
        )
    if as_json:
        print_json({**dataclasses.asdict(report), "missing": report.missing})
        return 0
    tensors = "tensor" if report.tensors == 1 else "tensors"
    console().print(f"{report.path}: {report.tensors:,} {tensors}, {size(report.tensor_bytes)}")
    how = {
        "in place": "the index lies beside the shards",
        "reflink": "they share the checkpoint's blocks on storage: nothing was written",
        "hard link": "they are the checkpoint's files, under a second name: nothing was written",
        "copy": f"{size(report.bytes_written)} were verified and written",
    }
    console().print(f"{how[report.way]}, {report.seconds:.1f} s")
    for name in report.missing:
        console().print(f"{name} is missing: {REMEDY}", style="yellow")
    return 0
