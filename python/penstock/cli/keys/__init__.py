"""`penstock keys`: the commands for keys of sealed checkpoints."""

from __future__ import annotations

import click

from penstock.cli.examples import example
from penstock.cli.group import LazyGroup


@click.group(
    cls=LazyGroup,
    package="penstock.cli.keys",
    prefix="keys_",
    helps={
        "add": "Add recipients to the sealed checkpoint PATH; to a store, to each complete step.",
        "generate": "Make a key and write it to the new file FILE.",
        "list": "List the recipients of the sealed checkpoint PATH; of a store, those of each "
        "complete step.",
        "remove": "Remove each RECIPIENT from the sealed checkpoint PATH; from a store, from each "
        "complete step.",
        "rotate": "Replace the recipients of the sealed checkpoint PATH; of a store, of each "
        "complete step.",
    },
    epilog=example("penstock keys generate keys.txt"),
)
def keys() -> None:
    """Make keys for sealed checkpoints, and say who can open a checkpoint.

    Keys come from files, the environment and key management services; no option takes a secret.
    """
