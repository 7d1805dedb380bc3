"""`penstock keys generate FILE`: makes a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from penstock.cli.examples import example
from penstock.common.console import PATH, json_option, print_json
from penstock.sealing import generate

if TYPE_CHECKING:
    from pathlib import Path

JSON_KEYS = """\b
JSON: path, kind, recipient (the key's name in public).
"""


@click.command(
    epilog=example(
        "penstock keys generate keys.txt",
        "penstock keys generate --kind key-file team.key",
        after=JSON_KEYS,
    )
)
@click.argument("file", type=PATH)
@click.option(
    "--kind",
    type=click.Choice(["x25519", "key-file"]),
    default="x25519",
    show_default=True,
    help="A pair of keys, of which jobs that save need the public one; or one symmetric key.",
)
@json_option
def keys_generate(file: Path, kind: Literal["x25519", "key-file"], as_json: bool) -> int:
    """Make a key and write it to the new file FILE.

    Prints the recipient (age1…), for penstock.Sealing; of a symmetric key, its fingerprint. FILE
    can be read by its owner alone, and is never overwritten. The tools of age read a file of the
    kind x25519.
    """
    recipient = generate(file, kind=kind)
    if as_json:
        print_json({"path": str(file), "kind": kind, "recipient": recipient})
    else:
        click.echo(recipient)
    return 0
