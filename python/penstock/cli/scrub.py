"""`penstock scrub ROOT`: reads steps back before they are needed."""

from __future__ import annotations

import dataclasses
import os
from datetime import datetime
from typing import TYPE_CHECKING

import click

from penstock import _native
from penstock.cli.examples import example
from penstock.cli.paths import store_at
from penstock.cli.units import AGE, RATE
from penstock.common.console import (
    PLACE,
    REASON_CHARACTERS_MAX,
    console,
    json_option,
    print_json,
    progress_bar,
    size,
    table,
)
from penstock.common.file_names import FileNames

if TYPE_CHECKING:
    import penstock

STYLES = {"verified": "", "skipped": "dim", "damaged": "red", "failed": "red"}

TENSORS_NAMED_MAX = 4

JSON_KEYS = """\b
JSON: root, ok, bytes_checked, seconds, steps: a list of
  step, state ("verified", "skipped", "damaged" or "failed"), reason (or
  null), read_at_seconds (since 1970, or null), bytes_checked, seconds,
  problems: a list of file, offset, tensor (null where unknown), message,
    is_proven (wrong bytes; else senseless or unread).
"""


@click.command(
    epilog=example("penstock scrub /checkpoints --rate 200MB --max-age 7d", after=JSON_KEYS)
)
@click.argument("root", type=PLACE)
@click.option("--rate", type=RATE, help="Most bytes to read per second, as in 200MB.")
@click.option(
    "--max-age",
    type=AGE,
    default="7d",
    show_default=True,
    help="Skip steps read back more recently than this, as in 12h or 7d; 0 reads all.",
)
@json_option
def scrub(root: str, rate: int | None, max_age: int, as_json: bool) -> int:
    """Read back steps of the store ROOT that were not read recently.

    Steps that were never read come first, then those read longest ago. A scrub that was stopped
    resumes where it was. Exits with 1 if a step is damaged or cannot be read.
    """
    if rate == 0:
        raise click.BadParameter("must be more than 0", param_hint="--rate")
    store = store_at(root)
    with progress_bar("scrubbing", hidden=as_json) as update:
        report = store.scrub(bytes_per_second=rate, max_age_seconds=max_age, progress=update)
    if as_json:
        result = {**dataclasses.asdict(report), "ok": report.ok}
        print_json({**result, "bytes_checked": report.bytes_checked})
    else:
        _print(report)
    return 0 if report.ok else 1


def _print(report: penstock.reports.ScrubReport) -> None:
    out = console()
    if not report.steps:
        out.print(f"{report.root}: no steps")
        return
    columns = ("step", "result", "checked", "read back", "")
    rows = table(*columns, numbers=["step", "checked"], folded=[""])
    reasons = []
    for step in report.steps:
        reason = _reason(step, report.root)
        if len(reason) > REASON_CHARACTERS_MAX:
            reasons.append(f"step {step.step}: {reason}")
            reason = ""
        rows.add_row(
            str(step.step),
            step.state,
            size(step.bytes_checked) if step.bytes_checked else "",
            "" if step.read_at_seconds is None else _local(step.read_at_seconds),
            reason,
            style=STYLES[step.state],
        )
    out.print(rows)
    if reasons:
        out.print("", *reasons, sep="\n")
    for step in report.steps:
        if step.state == "damaged":
            path = os.path.join(report.root, _native.step_directory(step.step))
            out.print(f"penstock verify {path} --explain", style="dim", soft_wrap=True)


def _reason(step: penstock.reports.ScrubbedStep, root: str) -> str:
    path = os.path.join(root, _native.step_directory(step.step))
    tensors = sorted({problem.tensor for problem in step.problems if problem.tensor})
    named = f" ({', '.join(tensors[:TENSORS_NAMED_MAX])}" if tensors else ""
    if named:
        rest = len(tensors) - TENSORS_NAMED_MAX
        named += f" and {rest:,} more)" if rest > 0 else ")"
    reason = step.reason or ""
    return FileNames.beside_all(path, [reason]).short(reason) + named


def _local(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
