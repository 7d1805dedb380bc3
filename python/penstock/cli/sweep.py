"""`penstock sweep ROOT`: removes leftovers of killed saves."""

from __future__ import annotations

import click

from penstock.cli.examples import example
from penstock.cli.paths import store_at
from penstock.cli.units import AGE
from penstock.common.console import PLACE, console, json_option, print_json, size, table

JSON_KEYS = """\b
JSON: root, dry_run, bytes (freed, or that would be), swept: a list of path
  (a directory that files were or would be removed from), bytes.
"""


@click.command(epilog=example("penstock sweep /checkpoints --dry-run", after=JSON_KEYS))
@click.argument("root", type=PLACE)
@click.option("--dry-run", is_flag=True, help="Remove nothing; only list.")
@click.option(
    "--min-age",
    type=AGE,
    help="In a bucket, keep files younger than this, as in 6h; at least 15min. [default: a day]",
)
@json_option
def sweep(root: str, dry_run: bool, min_age: int | None, as_json: bool) -> int:
    """Remove the leftovers of killed saves from the store ROOT.

    Running saves, complete and damaged checkpoints, and files that Penstock did not write are left
    alone.
    """
    store = store_at(root)
    swept = store.sweep(dry_run=dry_run, min_age_seconds=min_age)
    total = sum(orphan.bytes for orphan in swept)
    if as_json:
        entries = [orphan._asdict() for orphan in swept]
        print_json({"root": store.root, "dry_run": dry_run, "bytes": total, "swept": entries})
        return 0
    out = console()
    if not swept:
        out.print(f"{store.root}: nothing to sweep")
        return 0
    freed = "would free" if dry_run else "freed"
    rows = table("directory", freed, numbers=[freed], folded=["directory"])
    for orphan in swept:
        rows.add_row(orphan.path, size(orphan.bytes))
    out.print(rows)
    return 0
