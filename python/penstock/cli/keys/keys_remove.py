"""`penstock keys remove PATH`: takes a checkpoint from recipients."""

from __future__ import annotations

import functools

import click

from penstock import sealing
from penstock.cli.examples import example
from penstock.cli.keys.given import JSON_KEYS, change
from penstock.common.console import PLACE, json_option


@click.command(epilog=example("penstock keys remove /checkpoints age1…", after=JSON_KEYS))
@click.argument("path", type=PLACE)
@click.argument("names", metavar="RECIPIENT…", nargs=-1, required=True)
@json_option
def keys_remove(path: str, names: tuple[str, ...], as_json: bool) -> int:
    """Remove each RECIPIENT from the sealed checkpoint PATH; from a store, from each complete step.

    A RECIPIENT is named as `penstock keys list` shows it. The last one cannot be removed. Copies
    that a former recipient has made stay readable to it.
    """
    return change(path, as_json, functools.partial(sealing.remove_recipients, names=names))
