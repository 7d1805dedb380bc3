"""`penstock doctor`: checks a machine and a directory, and how to improve them."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import click

from penstock.cli.examples import example
from penstock.common.console import PLACE, console, json_option, print_json, table
from penstock.common.paths import absolute, of_bucket

if TYPE_CHECKING:
    from penstock.doctor import Examination

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}

JSON_KEYS = """\b
JSON: directory, ok, findings: a list of check, status ("ok", "warn",
  "fail"), found, why, remedy.
"""


@click.command(epilog=example("penstock doctor /checkpoints", after=JSON_KEYS))
@click.argument("directory", type=PLACE, default=".")
@click.option("--no-measure", is_flag=True, help="Only check, in a second instead of twenty.")
@json_option
def doctor(directory: str, no_measure: bool, as_json: bool) -> int:
    """Check this machine and DIRECTORY before a run.

    DIRECTORY may be the URL of a bucket: then small objects and a checkpoint of 256 MB test whether
    its store does what checkpoints need; all of them are removed again.

    Each finding is ok, a warning (slower or less safe than it could be) or a failure (saves fail or
    are not durable), with a remedy. Exits with 1 if anything failed.
    """
    from penstock.doctor import examine

    if not (of_bucket(directory) or os.path.isdir(directory)):
        raise click.UsageError(f"{directory} is no directory: make it first")
    display = console(stderr=True)
    with display.status("looking") as status:

        def progress(text: str) -> None:
            status.update(f"measuring: {text}")

        found = examine(absolute(directory), measures=not no_measure, progress=progress)
    if as_json:
        print_json({**dataclasses.asdict(found), "ok": found.ok})
    else:
        _print(found)
    return 0 if found.ok else 1


def _print(found: Examination) -> None:
    out = console()
    rows = table("", "check", "found", folded=["check", "found"])
    for one in found.findings:
        rows.add_row(
            one.status,
            one.check,
            one.found,
            style=_STYLES[one.status] if one.status != "ok" else "",
        )
    out.print(rows)
    for one in found.findings:
        if one.status != "ok":
            out.print(f"\n{one.status}: {one.check}: {one.found}", style=_STYLES[one.status])
            out.print(f"  {one.why}")
            if one.remedy:
                out.print(f"  {one.remedy}", style="bold")
    counts = [sum(one.status == word for one in found.findings) for word in _STYLES]
    good, warnings, failures = counts
    told = f"{good} ok, {warnings} warning{'s'[: warnings != 1]}"
    out.print(f"\n{found.directory}: {told}, {failures} failure{'s'[: failures != 1]}")
