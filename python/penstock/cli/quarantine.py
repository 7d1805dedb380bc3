"""`penstock quarantine ROOT STEP`: moves a damaged step out of the way, kept for salvage."""

from __future__ import annotations

import click

from penstock.cli.examples import example
from penstock.cli.paths import store_at
from penstock.common.console import PLACE, console, json_option, print_json

JSON_KEYS = """\b
JSON: root, step, path (where the step is now).
"""


@click.command(
    "quarantine", epilog=example("penstock quarantine /checkpoints 1000", after=JSON_KEYS)
)
@click.argument("root", type=PLACE)
@click.argument("step", type=click.IntRange(min=0))
@json_option
def quarantine(root: str, step: int, as_json: bool) -> int:
    """Quarantine the damaged step STEP of the store ROOT.

    It is renamed within the store: loads, saves and sweeps ignore it, and penstock salvage takes
    its new path. Only a step known to be damaged can be quarantined: penstock verify ROOT and
    penstock scrub ROOT read steps and record what they find.
    """
    store = store_at(root)
    path = store.quarantine(step)
    if as_json:
        print_json({"root": store.root, "step": step, "path": path})
    else:
        console().print(f"step {step} is now {path}")
    return 0
