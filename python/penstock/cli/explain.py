"""`penstock verify PATH --explain`: which tensors of a damaged checkpoint are still intact."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from penstock.cli.console import console, size, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock

ROWS_MAX = 40

_DESCRIBED = {
    "whole": "manifest and part are whole",
    "part": "the manifest is lost: nothing vouches for the part",
    "headers": "the part is lost: no digests and no plain values are left",
}


def as_json(explained: penstock.Explanation) -> dict[str, Any]:
    """The result for programs."""
    return {
        "path": explained.path,
        "ok": explained.ok,
        "step": explained.step,
        "described_by": explained.described_by,
        "bytes_checked": explained.bytes_checked,
        "seconds": explained.seconds,
        "intact": _sum(explained.intact),
        "unverified": _sum(explained.unverified),
        "hit": _sum(explained.hit),
        "tensors": [dataclasses.asdict(tensor) for tensor in explained.tensors],
        "missing_files": list(explained.missing_files),
        "problems": [dataclasses.asdict(problem) for problem in explained.problems],
        "earlier_step": explained.earlier_step,
        "earlier_is_verified": explained.earlier_is_verified,
    }


def _sum(tensors: Sequence[penstock.TensorFate]) -> dict[str, int]:
    return {"count": len(tensors), "bytes": sum(tensor.bytes for tensor in tensors)}


def show(explained: penstock.Explanation) -> None:
    """Prints the result for people."""
    out = console()
    summary = table("what", "value", folded=["value"])
    summary.show_header = False
    summary.add_row("path", explained.path)
    summary.add_row("description", _DESCRIBED[explained.described_by])
    for what, tensors in (
        ("intact", explained.intact),
        ("unverified", explained.unverified),
        ("hit", explained.hit),
    ):
        if tensors or what != "unverified":
            total = _sum(tensors)
            plural = "tensor" if total["count"] == 1 else "tensors"
            summary.add_row(what, f"{total['count']} {plural}, {size(total['bytes'])}")
    for name in explained.missing_files:
        summary.add_row("missing file", name)
    if explained.earlier_step is not None:
        proof = "read back whole" if explained.earlier_is_verified else "complete, not read back"
        summary.add_row("step before", f"{explained.earlier_step} ({proof})")
    out.print(summary)
    _print_problems(explained)
    _print_hit(explained)
    if not explained.ok and (explained.intact or explained.unverified):
        option = "" if explained.intact else " --unverified"
        out.print(f"\npenstock salvage {explained.path} OUT{option}", style="dim", soft_wrap=True)


def _print_problems(explained: penstock.Explanation) -> None:
    if explained.problems:
        rows = table("file", "offset", "problem", numbers=["offset"], folded=["file", "problem"])
        for problem in explained.problems[:ROWS_MAX]:
            offset = "" if problem.offset is None else str(problem.offset)
            rows.add_row(problem.file, offset, problem.message)
        console().print("", rows)


def _print_hit(explained: penstock.Explanation) -> None:
    out = console()
    if explained.hit:
        rows = table("hit", "dtype", "size", numbers=["size"], folded=["hit"])
        for tensor in explained.hit[:ROWS_MAX]:
            rows.add_row(tensor.name, tensor.dtype, size(tensor.bytes))
        out.print("", rows)
        if len(explained.hit) > ROWS_MAX:
            out.print(f"{ROWS_MAX} of {len(explained.hit)}; --json lists all", style="dim")
