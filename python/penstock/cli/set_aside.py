"""`penstock set-aside ROOT STEP`: moves a damaged step out of the way, kept for salvage."""

from __future__ import annotations

import click

from penstock.cli.examples import example
from penstock.cli.paths import store_at
from penstock.common.console import PLACE, console, json_option, print_json

JSON_KEYS = """\b
JSON: root, step, path (where the step is now).
"""


@click.command("set-aside", epilog=example("penstock set-aside /checkpoints 1000", after=JSON_KEYS))
@click.argument("root", type=PLACE)
@click.argument("step", type=click.IntRange(min=0))
@json_option
def set_aside(root: str, step: int, as_json: bool) -> int:
    """Set the damaged step STEP of the store ROOT aside.

    It is renamed within the store: loads, saves and sweeps ignore it, and penstock salvage takes
    its new path. Only a step known to be damaged can be set aside: penstock verify ROOT and
    penstock scrub ROOT read steps and record what they find.
    """
    store = store_at(root)
    path = store.set_aside(step)
    if as_json:
        print_json({"root": store.root, "step": step, "path": path})
    else:
        console().print(f"step {step} is now {path}")
    return 0
