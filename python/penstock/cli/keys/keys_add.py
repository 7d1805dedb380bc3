"""`penstock keys add PATH`: lets others open a checkpoint."""

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
        "penstock keys add /checkpoints --recipient you.pub --identity keys.txt", after=JSON_KEYS
    )
)
@click.argument("path", type=PLACE)
@recipient_option
@identity_option
@json_option
def keys_add(
    path: str, recipients: tuple[str, ...], identities: tuple[str, ...], as_json: bool
) -> int:
    """Add recipients to the sealed checkpoint PATH; to a store, to each complete step.

    Only the manifest is replaced; no data is read or written.
    """
    added = functools.partial(
        sealing.add_recipients, recipients=recipients, identities=opened_by(identities)
    )
    return change(path, as_json, added)
