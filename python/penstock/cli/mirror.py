"""`penstock mirror ROOT URL`: copies steps of a store to a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock.cli.examples import example
from penstock.cli.keys.given import optional_recipient_option
from penstock.cli.paths import store_at
from penstock.cli.units import RATE
from penstock.common.console import (
    PLACE,
    console,
    json_option,
    print_json,
    progress_bar,
    size,
    table,
)

if TYPE_CHECKING:
    from penstock.checkpoint.mirroring.copy_step import StepCopies
    from penstock.common.progress import Progress

STYLES = {"sent": "", "there": "dim", "not here": "dim", "failed": "red"}

JSON_KEYS = """\b
JSON: root, url, ok, sent_bytes, steps: a list of
  step, here (its state in ROOT, or null), there (at URL, before; "another"
  where that is another checkpoint; or null), result ("sent", "there",
  "not here", "failed", or null with --list), sent_bytes, error (or null).
"""


@click.command(
    epilog=example("penstock mirror /checkpoints s3://bucket/run-7 --every 1000", after=JSON_KEYS)
)
@click.argument("root", type=PLACE)
@click.argument("url", type=PLACE)
@click.option(
    "--every", type=click.IntRange(min=1), default=1, help="Only steps that are multiples of this."
)
@click.option("--rate", type=RATE, help="Most bytes to send per second, as in 200MB.")
@click.option(
    "--connections",
    type=click.IntRange(1, 256),
    default=24,
    show_default=True,
    help="Concurrent requests.",
)
@optional_recipient_option
@click.option("--list", "lists", is_flag=True, help="Send nothing; list where each step is.")
@json_option
def mirror(
    root: str,
    url: str,
    every: int,
    rate: int | None,
    connections: int,
    recipients: tuple[str, ...],
    lists: bool,
    as_json: bool,
) -> int:
    """Copy complete steps of the store ROOT to URL, a bucket that lacks them.

    Files are copied as they are, sealed or clear; with --recipient, copies of clear steps are
    sealed. The newest step goes first. An interrupted copy resumes where it stopped, a sealed one
    begins anew. Nothing is ever deleted at URL, and nothing but signatures replaced. Exits with 1
    if a step could not be copied.
    """
    if rate == 0:
        raise click.BadParameter("must be more than 0", param_hint="--rate")
    store = store_at(root)
    try:
        wanted = penstock.Mirror(
            url,
            every=every,
            bytes_per_second=rate,
            connections=connections,
            sealing=penstock.Sealing(recipients) if recipients else None,
        )
    except penstock.errors.UnsupportedPathError as error:
        raise click.BadParameter(str(error), param_hint="URL") from None
    # Imported here, as it imports NumPy, which helps do not need.
    from penstock.checkpoint.mirroring.copy_step import compared

    found = compared(store.root, wanted)
    rows = [_row(copies) for copies in found]
    if not lists:
        with progress_bar("mirroring", hidden=as_json) as update:
            for row in reversed(rows):
                _copy(store.root, wanted, row, update)
    sent_bytes = sum(row["sent_bytes"] for row in rows)
    is_ok = all(row["result"] != "failed" for row in rows)
    if as_json:
        result = {"root": store.root, "url": wanted.url, "ok": is_ok, "sent_bytes": sent_bytes}
        print_json({**result, "steps": rows})
    else:
        _print(store.root, wanted.url, rows)
    return 0 if is_ok else 1


def _row(copies: StepCopies) -> dict[str, Any]:
    return {
        "step": copies.step,
        "here": copies.here,
        "there": copies.there,
        "result": None,
        "sent_bytes": 0,
        "error": None,
    }


def _copy(root: str, wanted: penstock.Mirror, row: dict[str, Any], update: Progress) -> None:
    """Copies a step, if it is complete and due."""
    if row["here"] != "complete" or not wanted.is_due(row["step"]):
        row["result"] = "there" if row["there"] == "complete" else "not here"
        return
    try:
        from penstock.checkpoint.mirroring.copy_step import mirror_step

        report = mirror_step(root, row["step"], wanted, progress=update)
    except penstock.PenstockError as error:
        row |= {"result": "failed", "error": str(error)}
        return
    row |= {"result": "sent" if report.sent_bytes else "there", "sent_bytes": report.sent_bytes}


def _print(root: str, url: str, rows: list[dict[str, Any]]) -> None:
    out = console()
    if not rows:
        out.print(f"{root} and {url}: no steps")
        return
    shown = table("step", "here", "there before", "", "sent", numbers=["step", "sent"])
    for row in rows:
        result = row["result"] or ""
        sent = size(row["sent_bytes"]) if row["sent_bytes"] else ""
        states = (row["here"] or "", row["there"] or "")
        shown.add_row(str(row["step"]), *states, result, sent, style=STYLES.get(result, ""))
    out.print(shown)
    for row in rows:
        if row["error"] is not None:
            out.print(f"step {row['step']}: {row['error']}", style="red", soft_wrap=True)
