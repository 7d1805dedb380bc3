"""`penstock keys list PATH`: shows who can open a checkpoint."""

from __future__ import annotations

import click

from penstock import sealing
from penstock.cli.examples import example
from penstock.cli.keys.given import JSON_KEYS, change
from penstock.common.console import PLACE, json_option


@click.command(epilog=example("penstock keys list /checkpoints", after=JSON_KEYS))
@click.argument("path", type=PLACE)
@json_option
def keys_list(path: str, as_json: bool) -> int:
    """List the recipients of the sealed checkpoint PATH; of a store, those of each complete step.

    This takes no key, and the list is not authenticated.
    """
    return change(path, as_json, sealing.recipients)
