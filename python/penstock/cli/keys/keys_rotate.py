"""`penstock keys rotate PATH`: replaces all recipients of a checkpoint."""

from __future__ import annotations

import functools

import click

from penstock import sealing
from penstock.cli.examples import example
from penstock.cli.keys.given import (
    JSON_KEYS,
    change,
    identity_option,
    opened_by,
    recipient_option,
)
from penstock.common.console import PLACE, json_option


@click.command(
    epilog=example(
        "penstock keys rotate /checkpoints --recipient new.txt --identity old.txt", after=JSON_KEYS
    )
)
@click.argument("path", type=PLACE)
@recipient_option
@identity_option
@json_option
def keys_rotate(
    path: str, recipients: tuple[str, ...], identities: tuple[str, ...], as_json: bool
) -> int:
    """Replace the recipients of the sealed checkpoint PATH; of a store, of each complete step.

    The data keys stay the same, so copies that former recipients have made stay readable to them.
    """
    rotated = functools.partial(
        sealing.rotate, recipients=recipients, identities=opened_by(identities)
    )
    return change(path, as_json, rotated)
