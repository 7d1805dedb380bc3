"""`penstock ls ROOT`: lists the steps of a store."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock import _native
from penstock.cli.examples import example
from penstock.cli.keys.given import identity_option, opened_by
from penstock.cli.paths import store_at
from penstock.common.console import (
    PLACE,
    REASON_CHARACTERS_MAX,
    console,
    escaped,
    json_option,
    local_time,
    print_json,
    size,
    table,
)
from penstock.common.file_names import FileNames

if TYPE_CHECKING:
    from penstock.checkpoint.steps.rows import Mark, StepInfo
    from penstock.sealing import Identities

NUMBERS = ("step", "size", "tensors")
STYLES = {
    "complete": "",
    "incomplete": "yellow",
    "damaged": "red",
    "newer": "yellow",
    "partial": "yellow",
    "unreadable": "red",
}

JSON_KEYS = """\b
JSON: root, newest (the newest complete step that is not known to be
  damaged, or null), quarantined: damaged steps that were quarantined, a
  list of step, path, bytes; steps: a list of
  step, state ("complete", "incomplete", "damaged", "partial", "newer" or
  "unreadable"), reason (or null), path, bytes (of all files that can be
  seen), tensors, tensor_bytes, created (UTC), id, previous (ids of the
  checkpoints before it, newest first) and sealed, which are null unless the
  step can be opened, protected, read_back ("verified", "damaged" or null),
  read_at_seconds (since 1970, or null).
"""


@click.command(epilog=example("penstock ls /checkpoints", after=JSON_KEYS))
@click.argument("root", type=PLACE)
@identity_option
@json_option
def ls(root: str, identities: tuple[str, ...], as_json: bool) -> int:
    """List the steps of the store ROOT, complete or not."""
    steps = describe(root, opened_by(identities))
    newest = max((row["step"] for row in steps if _is_loadable(row)), default=None)
    quarantined: list[dict[str, Any]] = [
        {"step": step, "path": path, "bytes": _bytes_within(path)}
        for step, path in store_at(root).quarantined()
    ]
    if as_json:
        print_json({"root": root, "newest": newest, "steps": steps, "quarantined": quarantined})
        return 0
    out = console()
    if not (steps or quarantined):
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
            _remarks(row, is_newest=row["step"] == newest),
            style="red" if row["read_back"] == "damaged" else STYLES[row["state"]],
        )
    for old in quarantined:
        remark = f"in {os.path.basename(old['path'])}"
        rows.add_row(
            str(old["step"]), "quarantined", size(old["bytes"]), "", "", remark, style="dim"
        )
    out.print(rows)
    reasons = {row["step"]: _reason(row) for row in steps}
    told = [
        f"step {step}: {reason}"
        for step, reason in reasons.items()
        if len(reason) > REASON_CHARACTERS_MAX
    ]
    if told:
        out.print("", *told, sep="\n")
    return 0


def _is_loadable(row: dict[str, Any]) -> bool:
    return (row["state"], row["read_back"] == "damaged") == ("complete", False)


def _remarks(row: dict[str, Any], *, is_newest: bool) -> str:
    """Remarks about a step beside its state."""
    remarks = ["newest"] if is_newest else []
    if row["sealed"]:
        remarks.append("sealed")
    if row["protected"]:
        remarks.append("protected")
    if row["read_back"] is not None:
        remarks.append("verified" if row["read_back"] == "verified" else "found damaged")
    reason = _reason(row)
    return ", ".join([*remarks, *([reason] if 0 < len(reason) <= REASON_CHARACTERS_MAX else [])])


def _reason(row: dict[str, Any]) -> str:
    reason = row["reason"] or ""
    return FileNames.beside_all(row["path"], [reason]).short(reason)


def describe(root: str, identities: Identities | None = None) -> list[dict[str, Any]]:
    """A row of facts for each step, oldest first; of sealed ones with what identities open."""
    store = store_at(root)
    protected, marks = set(store.protected()), {}
    try:
        marks = store.marks()
    except penstock.PenstockError as error:
        click.echo(escaped(f"warning: {error}"), err=True)
    return [
        _row(store.path(info.step), info, info.step in protected, marks.get(info.step), identities)
        for info in store.scan()
    ]


def _row(
    path: str,
    info: StepInfo,
    is_protected: bool,
    mark: Mark | None,
    identities: Identities | None,
) -> dict[str, Any]:
    state, reason, content = info.state, info.reason, None
    if state in ("complete", "partial"):
        try:
            content = penstock.inspect(path)
            if content.is_closed and identities is not None:
                content = penstock.inspect(path, identities=identities)
        except (penstock.errors.WrongKeyError, penstock.errors.KmsError) as error:
            # The identities open another step of the store.
            reason = str(error)
        except penstock.errors.StorageError as error:
            state, reason = "unreadable", str(error)
        except penstock.errors.FormatVersionError as error:
            state, reason = "newer", str(error)
        except penstock.PenstockError as error:
            # The scan checks manifest and file sizes, `inspect` every part as well.
            state, reason = "damaged", str(error)
    return {
        "step": info.step,
        "state": state,
        "reason": reason,
        "path": path,
        "bytes": content.bytes if content else _bytes_within(path),
        "tensors": len(content.tensors) if content and not content.is_closed else None,
        "tensor_bytes": content.tensor_bytes if content and not content.is_closed else None,
        "created": content.created if content else None,
        "id": content.id if content else None,
        "previous": list(content.previous) if content else None,
        "sealed": None if content is None else content.recipients is not None,
        "protected": is_protected,
        "read_at_seconds": mark.read_at_seconds if mark else None,
        "read_back": None if mark is None else "verified" if mark.is_good else "damaged",
    }


def _bytes_within(path: str) -> int:
    total = 0
    # If the directory may not be read, its state says so.
    with contextlib.suppress(OSError):
        for name in _native.list_names(path):
            # A running save, or a sweep, may remove a file between the two calls.
            found = _native.stat(os.path.join(path, name))
            total += 0 if found is None else found[1]
    return total
