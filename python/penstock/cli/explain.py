"""`penstock verify PATH --explain`: shows which tensors of a damaged checkpoint are intact."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from penstock.common.console import console, size, summary_table, table
from penstock.common.file_names import FileNames

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock

ROWS_MAX = 40

_DESCRIBED = {
    "whole": "manifest and part are whole",
    "part": "the manifest is lost: nothing vouches for the part",
    "headers": "the part is lost: no digests and no plain values are left",
}
_MANY_DESCRIBED = {
    "whole": "manifest and all parts are whole",
    "part": "the manifest is lost: nothing vouches for the parts",
    "headers": "parts are lost: nothing vouches for what they described",
}

_RANKS_NAMED_MAX = 8


def as_json(explained: penstock.reports.Explanation) -> dict[str, Any]:
    """The result as a dictionary, for JSON."""
    return {
        "path": explained.path,
        "ok": explained.ok,
        "step": explained.step,
        "described_by": explained.described_by,
        "world_size": explained.world_size,
        "ranks_lost": list(explained.ranks_lost),
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


def _sum(tensors: Sequence[penstock.reports.TensorFate]) -> dict[str, int]:
    return {"count": len(tensors), "bytes": sum(tensor.bytes for tensor in tensors)}


def show(explained: penstock.reports.Explanation) -> None:
    """Prints the result as tables."""
    out = console()
    names = _names(explained)
    summary = summary_table(("path", explained.path))
    is_many = explained.world_size > 1
    described = _MANY_DESCRIBED if is_many else _DESCRIBED
    summary.add_row("description", described[explained.described_by])
    if is_many:
        lost = explained.ranks_lost
        summary.add_row("ranks", f"{explained.world_size}{_lost(lost) if lost else ''}")
    for what, tensors in (
        ("intact", explained.intact),
        ("unverified", explained.unverified),
        ("hit", explained.hit),
    ):
        if tensors or what != "unverified":
            total = _sum(tensors)
            plural = "tensor" if total["count"] == 1 else "tensors"
            summary.add_row(what, f"{total['count']} {plural}, {size(total['bytes'])}")
    for name in explained.missing_files[:ROWS_MAX]:
        summary.add_row("missing file", names.short(name))
    if len(explained.missing_files) > ROWS_MAX:
        summary.add_row("missing files", f"{len(explained.missing_files)} in all")
    if explained.earlier_step is not None:
        proof = "read back whole" if explained.earlier_is_verified else "complete, not read back"
        summary.add_row("step before", f"{explained.earlier_step} ({proof})")
    out.print(summary)
    if is_many:
        _print_ranks(explained)
    _print_problems(explained, names)
    _print_hit(explained, names)
    if not explained.ok and (explained.intact or explained.unverified):
        option = " --unverified"
        if explained.intact:
            option = " [--unverified]" if explained.unverified else ""
        out.print(f"\npenstock salvage {explained.path} OUT{option}", style="dim", soft_wrap=True)


def _names(explained: penstock.reports.Explanation) -> FileNames:
    texts = [*explained.missing_files]
    texts += [text for one in explained.problems for text in (one.file, one.message) if text]
    texts += [one.hit for one in explained.hit if one.hit]
    return FileNames.beside_all(explained.path, texts)


def _lost(ranks: Sequence[int]) -> str:
    """Names the ranks whose parts are lost."""
    named = ", ".join(map(str, ranks[:_RANKS_NAMED_MAX]))
    rest = len(ranks) - _RANKS_NAMED_MAX
    more = f" and {rest} more" if rest > 0 else ""
    return f", of which {named}{more} lost {'its part' if len(ranks) == 1 else 'their parts'}"


def _print_ranks(explained: penstock.reports.Explanation) -> None:
    """Prints the tensors left of each rank that lost some, and of those shared by all."""
    counts: dict[int | None, Counter[str]] = {None: Counter()}
    for fate in explained.tensors:
        of = counts.setdefault(fate.rank, Counter())
        state = "hit" if fate.hit else "intact" if fate.is_vouched_for else "unverified"
        of[state] += 1
        of["bytes"] += fate.bytes if state != "hit" else 0
    for rank in explained.ranks_lost:
        counts.setdefault(rank, Counter())
    states = ["intact", "unverified", "hit"] if explained.unverified else ["intact", "hit"]
    rows = table("tensors of", *states, "left", numbers=[*states, "left"])
    shown = [
        rank
        for rank in sorted(rank for rank in counts if rank is not None)
        if rank in explained.ranks_lost or counts[rank]["hit"] or counts[rank]["unverified"]
    ]
    named = [("all ranks", counts[None])]
    named += [(f"rank {rank} alone", counts[rank]) for rank in shown[:ROWS_MAX]]
    for name, of in named:
        rows.add_row(name, *(str(of[state]) for state in states), size(of["bytes"]))
    console().print("", rows)
    if len(shown) > ROWS_MAX:
        console().print(f"{ROWS_MAX} of {len(shown)} ranks; --json lists all", style="dim")
    whole = explained.world_size - len(shown)
    if whole:
        what = "1 rank" if whole == 1 else f"{whole} ranks"
        console().print(f"all that {what} had alone is intact", style="dim")


def _print_problems(explained: penstock.reports.Explanation, names: FileNames) -> None:
    if explained.problems:
        rows = table("file", "offset", "problem", numbers=["offset"], folded=["file", "problem"])
        for problem in explained.problems[:ROWS_MAX]:
            offset = "" if problem.offset is None else str(problem.offset)
            file = "" if problem.file is None else names.short(problem.file)
            rows.add_row(file, offset, names.short(problem.message))
        console().print("", rows)
        if len(explained.problems) > ROWS_MAX:
            counted = f"{ROWS_MAX} of {len(explained.problems)} problems"
            console().print(f"{counted}; --json lists all", style="dim")


def _print_hit(explained: penstock.reports.Explanation, names: FileNames) -> None:
    out = console()
    if explained.hit:
        # With many ranks the file names do not show why a tensor that they share is damaged.
        is_many = explained.world_size > 1
        further = ["of", "why"] if is_many else []
        columns = ("hit", "dtype", "size", *further)
        rows = table(*columns, numbers=["size"], folded=["hit", "why"])
        for tensor in explained.hit[:ROWS_MAX]:
            whose = "all" if tensor.rank is None else f"rank {tensor.rank}"
            why = names.short(tensor.hit or "")
            cells = [tensor.name, tensor.dtype, size(tensor.bytes)]
            rows.add_row(*cells, *([whose, why] if is_many else []))
        out.print("", rows)
        if len(explained.hit) > ROWS_MAX:
            out.print(f"{ROWS_MAX} of {len(explained.hit)}; --json lists all", style="dim")
