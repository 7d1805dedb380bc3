"""`penstock ls ROOT`: the steps of a store."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock.cli.console import PATH, console, json_option, local_time, print_json, size, table

if TYPE_CHECKING:
    from penstock.store import StepInfo

NUMBERS = ("step", "size", "tensors")
STYLES = {"complete": "", "incomplete": "yellow", "damaged": "red", "newer": "yellow"}

JSON_KEYS = """\b
JSON: root, newest (the newest complete step, or null), steps: a list of
  step, state ("complete", "incomplete", "damaged" or "newer"), reason (or null),
  path, bytes (of all files), and tensors, tensor_bytes, created (UTC)
  and id, which are null unless the step is complete.
"""


@click.command(epilog=JSON_KEYS)
@click.argument("root", type=PATH)
@json_option
def ls(root: Path, as_json: bool) -> int:
    """List the steps of the store ROOT, complete or not."""
    steps = describe(root)
    newest = max((row["step"] for row in steps if row["state"] == "complete"), default=None)
    if as_json:
        print_json({"root": str(root), "newest": newest, "steps": steps})
        return 0
    out = console()
    if not steps:
        out.print(f"{root}: no steps")
        return 0
    rows = table("step", "state", "size", "tensors", "created", "", folded=[""], numbers=NUMBERS)
    for row in steps:
        rows.add_row(
            str(row["step"]),
            row["state"],
            size(row["bytes"]),
            "" if row["tensors"] is None else str(row["tensors"]),
            "" if row["created"] is None else local_time(row["created"]),
            "newest" if row["step"] == newest else row["reason"],
            style=STYLES[row["state"]],
        )
    out.print(rows)
    return 0


def describe(root: Path) -> list[dict[str, Any]]:
    """A row of facts for each step, oldest first.

    Raises:
        CheckpointNotFoundError: There is no directory, or it is a checkpoint itself.
    """
    if not root.exists():
        raise penstock.CheckpointNotFoundError(
            f"{root}: there is no such directory; check the path", path=str(root)
        )
    if (root / "manifest.json").exists():
        raise penstock.CheckpointNotFoundError(
            f"{root}: this is a checkpoint, not a store of them; try penstock inspect {root}",
            path=str(root),
        )
    store = penstock.CheckpointStore(root)
    return [_row(Path(store.path(info.step)), info) for info in store.scan()]


def _row(path: Path, info: StepInfo) -> dict[str, Any]:
    state, reason, content = info.state, info.reason, None
    if state == "complete":
        try:
            content = penstock.inspect(path)
        except penstock.PenstockError as error:
            # The scan looks at manifest and file sizes, this at every part as well.
            state, reason = "damaged", str(error)
    return {
        "step": info.step,
        "state": state,
        "reason": reason,
        "path": str(path),
        "bytes": content.bytes if content else _bytes_within(path),
        "tensors": len(content.tensors) if content else None,
        "tensor_bytes": content.tensor_bytes if content else None,
        "created": content.created if content else None,
        "id": content.id if content else None,
    }


def _bytes_within(path: Path) -> int:
    total = 0
    for file in path.iterdir():
        # A save that is running, or a sweep, may remove a file between the two calls.
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
