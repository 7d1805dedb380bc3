"""`penstock sign PATH`: signs a checkpoint."""

from __future__ import annotations

import dataclasses

import click

import penstock
from penstock.cli.examples import example
from penstock.cli.keys.given import KeyType
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

JSON_KEYS = """\b
JSON: path, checkpoint_id, signers (the keys in public), files (that the
  signatures cover), bytes_hashed, seconds.
"""


@click.command(
    epilog=example(
        "penstock sign /checkpoints/step-0000001000 --key ~/.ssh/id_ed25519",
        "penstock sign /checkpoints/step-0000001000 --key model-signing.pem",
        after=JSON_KEYS,
    )
)
@click.argument("path", type=PLACE)
@click.option(
    "--key",
    "keys",
    metavar="FILE",
    multiple=True,
    required=True,
    type=KeyType(),
    help="A private key: Ed25519 of ssh-keygen, which `ssh-keygen -Y verify` checks, or EC P-256 "
    "in PEM, which `model_signing verify key` checks. Before an ssh key with a passphrase stands "
    "another --key, passphrase-file:FILE or passphrase-env:NAME. May be given more than once.",
)
@json_option
def sign(path: str, keys: tuple[str, ...], as_json: bool) -> int:
    """Sign the checkpoint PATH: read every byte, and vouch for it with the key in FILE.

    Every file is compared with its digest and hashed. The signature is stored beside them, and
    replaces one of the same kind. penstock verify --signed-by checks it.
    """
    check_directory(path)
    signing_keys = penstock.signing.SigningKeys(keys)
    with progress_bar("signing", hidden=as_json) as update:
        result = penstock.sign(path, signing_keys, progress=update)
    if as_json:
        print_json(dataclasses.asdict(result))
        return 0
    rows = summary_table(
        ("signed", result.path),
        *(("by", signer) for signer in result.signers),
        ("covered", f"{result.files:,} files, {size(result.bytes_hashed)}"),
    )
    console().print(rows)
    return 0
